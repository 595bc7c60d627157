"""tools/benchmarks/peers.py: it measures every driver, and this project, on the same sequences."""

import pytest
from conftest import soak

from tools.benchmarks import peers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "cases, programs",
    [
        ("one", ["ours", "Trainer"]),
        soak("fsdp", ["ours fsdp", "accelerate FSDP"]),
        soak("ddp", ["ours", "Trainer", "accelerate"]),
    ],
)
def test_every_driver_is_measured(tmp_path, capsys, cases, programs):
    flags = f"--model tiny-gpt2 --cases {cases} --rounds 1 --steps 3 --skip 0 --out {tmp_path}"
    command = [*flags.split(), "--only", ",".join(programs)]
    assert peers.main(command) == 0, capsys.readouterr().out
    runs, facts = peers.load_runs(tmp_path / "measurements.json")
    assert [run.program for run in runs] == programs
    assert facts["versions"]["accelerate"] and facts["hardware"]["cores"]
    for run in runs:
        assert [step for step, _ in run.stamps] == [1, 2, 3]
        assert run.memory > run.setting.ranks * 2**28
        assert 8.1 < run.losses[0] < 8.5  # ln 4096 = 8.3
    out = capsys.readouterr().out
    assert all(f"| {program} | " in out for program in programs)
