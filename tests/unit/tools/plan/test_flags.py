"""Run files that leave a choice to the run, in the planner."""

import pytest

from distributed_training.errors import UserError
from distributed_training.memory.estimate import predict
from tools.plan import command, text
from tools.plan import flags as planner_flags
from tools.plan.workload import read_workload


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


def test_a_flag_of_a_run_overrides_the_file_and_is_printed(monkeypatch, tmp_path):
    """Also one that turns a switch off; before, the planner had no --no_compile."""
    file = tmp_path / "run.yaml"
    file.write_text("compile: true\nlora_r: 8\noptim: sgd\nprecision: fp32\n")
    line = f"plan_memory.py --config {file} --gpu_memory 16 --no_compile --optim adamw"
    monkeypatch.setattr("sys.argv", line.split())
    args, work, devices = read_workload(planner_flags.read_flags(planner_flags.build_parser("A.")))
    assert (work.optimizer, work.kernels.compiled, work.precision) == ("adamw", False, "fp32")
    printed = command.command_of(args, work, "dp", devices)
    assert printed.endswith("--no_compile --optim adamw")


@pytest.mark.parametrize(
    "flag, fits", [("", "checkpointing, batch 4"), ("--bf16_blocks", "no"), ("--cuda_graph", "no")]
)
def test_what_excludes_checkpointing_is_not_planned_with_it(monkeypatch, flag, fits):
    """A run would refuse the flags together."""
    line = f"plan_memory.py --model gpt2-large --gpu_memory 14 --seq_length 1024 {flag}"
    monkeypatch.setattr("sys.argv", line.split())
    _, work, devices = read_workload(planner_flags.read_flags(planner_flags.build_parser("A.")))
    assert text.fits_how(work, "dp", devices)[0] == fits
    found = text.as_dict(work, predict(work, "dp"), devices)
    assert (found["largest_batch_with_checkpointing"] is None) == bool(flag)


@pytest.mark.parametrize(
    "line, problem",
    [("--lora_dora", "--lora_dora needs --lora_r."), ("--batch_size auto", "--solve batch")],
)
def test_flags_of_a_run_that_cannot_be_planned(monkeypatch, line, problem):
    monkeypatch.setattr("sys.argv", ["plan_memory.py", *line.split()])
    with pytest.raises(UserError, match=problem):
        planner_flags.read_flags(planner_flags.build_parser("A plan."))
