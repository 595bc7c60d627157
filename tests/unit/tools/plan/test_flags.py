"""Run files that leave a choice to the run, in the planner."""

import pytest

from distributed_training.errors import UserError
from tools.plan import flags as planner_flags


def planned(monkeypatch, file, **flags):
    """The arguments of plan_memory.py for a run file, on three GPUs."""
    file.write_text("".join(f"{name}: {value}\n" for name, value in flags.items()))
    monkeypatch.setattr("sys.argv", ["plan_memory.py", "--config", str(file), "--gpus", "3"])
    return planner_flags.read_flags(planner_flags.build_parser("A plan."))


def test_the_plan_of_a_run_file_with_auto_or_a_global_batch(monkeypatch, tmp_path):
    args = planned(monkeypatch, tmp_path / "a.yaml", batch_size=8, global_batch_size=48)
    assert (args.batch_size, args.gradient_accumulation_steps) == (8, 2)
    assert planned(monkeypatch, tmp_path / "b.yaml", strategy="auto").strategy is None
    with pytest.raises(UserError, match="which a run chooses"):
        planned(monkeypatch, tmp_path / "c.yaml", batch_size="auto", global_batch_size=48)
