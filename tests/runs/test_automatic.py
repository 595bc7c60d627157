"""--strategy auto and --batch_size auto in a run: it is the run with the flags that were chosen."""

import pytest

WORK = "--seq_length 32 --max_steps 2 --num_samples 40 --no_eval --no_export --save_every 1".split()
AUTO = "--strategy auto --batch_size auto --global_batch_size 12".split()


def test_a_run_chooses_and_records_plain_flags(script):
    run = script(*WORK, *AUTO, launcher="torchrun", ranks=2)
    chosen = run.results["automatic"]
    assert (chosen["strategy"], chosen["batch_size"]) == ("dp", 6)
    assert chosen["runner_up"] and chosen["planned_bytes"] < chosen["limit_bytes"]
    assert run.results["flags"]["strategy"] == run.results["strategy"] == "dp"
    assert run.results["global_batch_size"] == 12


@pytest.mark.slow
def test_a_resumed_run_keeps_the_choice_and_its_losses(script, tmp_path):
    flags = [*WORK, "--precision", "fp32", "--dropout", "0", "--lr_scheduler", "constant"]
    plain = "--strategy zero2 --batch_size 2 --gradient_accumulation_steps 3 --max_steps 3".split()
    whole = script(*flags, *plain, launcher="torchrun", ranks=2)
    chosen = "--strategy zero2 --batch_size auto --global_batch_size 12".split()
    first = script(*flags, *chosen, launcher="torchrun", ranks=2, folder=tmp_path / "run")
    assert first.results["batch_size"] == 6
    more = [*flags, *chosen, "--resume", "--max_steps", "3"]
    resumed = script(*more, launcher="torchrun", ranks=2, folder=tmp_path / "run")
    assert resumed.results["automatic"]["kept"] and resumed.results["batch_size"] == 6
    assert resumed.losses == pytest.approx(whole.losses, rel=1e-5)
