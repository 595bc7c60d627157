"""benchmarks/peers.py: it measures every driver, and this project, on the same sequences."""

from benchmarks import peers


def test_every_driver_is_measured(tmp_path, capsys):
    flags = "--model tiny-gpt2 --cases one,fsdp --rounds 1 --steps 3 --skip 0 --out"
    command = [*flags.split(), str(tmp_path), "--only", "ours,Trainer,accelerate FSDP"]
    assert peers.main(command) == 0, capsys.readouterr().out
    runs, facts = peers.load_runs(tmp_path / "measurements.json")
    assert [run.program for run in runs] == ["ours", "Trainer", "accelerate FSDP"]
    assert facts["versions"]["accelerate"] and facts["hardware"]["cores"]
    for run in runs:
        assert [step for step, _ in run.stamps] == [1, 2, 3]
        assert len(run.peak_rss) == run.setting.ranks and min(run.peak_rss) > 2**28
        assert 8.1 < run.losses[0] < 8.5  # ln 4096 = 8.3
    out = capsys.readouterr().out
    assert "| Trainer | " in out and "| accelerate FSDP | " in out
