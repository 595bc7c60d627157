"""--strategy auto and --batch_size auto: the first candidate that fits every rank."""

import json
from types import SimpleNamespace

import pytest
import torch

from distributed_training.cli.parse import parse_arguments, read_command_line
from distributed_training.errors import UserError
from distributed_training.memory.fit import Limits
from distributed_training.print_flags import print_flags
from distributed_training.units import GB
from tools.choose import candidates, choose
from tools.plan import flags as planner_flags

GPT2 = ["--model", "gpt2", "--seq_length", "1024", "--precision", "fp32"]
BOTH = [*GPT2, "--strategy", "auto", "--batch_size", "auto", "--global_batch_size", "64"]


@pytest.fixture
def four_ranks(monkeypatch):
    """A context of rank 0 of four, whose memory in GB a test sets."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    ranks = SimpleNamespace(memory=[24.0, 24.0, 24.0, 24.0])

    def all_gather(value):  # the values of ranks with other limits
        if isinstance(value, tuple):  # planned and available bytes of a rank
            return [(value[0], int(memory * GB)) for memory in ranks.memory]
        return [
            [Limits(int(memory * GB)).hold(need, 0.9) for need in ranks.needs]
            for memory in ranks.memory
        ]

    def remember(original):
        def estimate(self):
            ranks.needs.append(original(self))
            ranks.estimates[self.strategy, self.work.batch_size] = ranks.needs[-1]
            return ranks.needs[-1]

        return estimate

    ranks.needs, ranks.estimates = [], {}
    monkeypatch.setattr(candidates.Candidate, "estimate", remember(candidates.Candidate.estimate))
    monkeypatch.setattr(choose, "memory_limits", lambda ctx: Limits(int(ranks.memory[0] * GB)))
    ranks.ctx = SimpleNamespace(
        **{"rank": 0, "world_size": 4, "simulated": False, "precision": "fp32"},
        **{"device": torch.device("cpu"), "capability": (0, 0), "node_of_rank": [0] * 4},
        **{"all_gather": all_gather, "broadcast_from_rank0": lambda value: value},
    )
    return ranks


def chosen(ranks, argv):
    ranks.needs.clear()
    settings = choose.choose(parse_arguments(argv), ranks.ctx)
    flags = settings.flags()
    found = [flags[name] for name in ("strategy", "batch_size", "gradient_accumulation_steps")]
    assert settings.parallelism.to_choose == () and settings.training.global_batch(4) == 64
    return found, settings.parallelism.choice


def test_the_first_that_fits_is_chosen_on_all_ranks(four_ranks):
    four_ranks.memory = [12.0] * 4
    (strategy, batch, steps), choice = chosen(four_ranks, BOTH)
    assert strategy == "dp" and batch * steps == 16 and batch < 16
    assert choice["runner_up"] and not choice["kept"]
    limit = 0.9 * 12 * GB
    assert choice["planned_bytes"] == four_ranks.estimates["dp", batch].total <= limit
    assert four_ranks.estimates["dp", 2 * batch].total > limit
    four_ranks.memory[2] = 6.0  # all ranks get smaller micro-batches
    assert chosen(four_ranks, BOTH)[0][1] < batch


def test_a_strategy_is_chosen_for_a_given_batch(four_ranks):
    four_ranks.memory = [3.0] * 4
    argv = [*GPT2, "--strategy", "auto", "--batch_size", "1", "--global_batch_size", "64"]
    (strategy, batch, steps), _ = chosen(four_ranks, argv)
    assert strategy not in ("dp", "zero1") and (batch, steps) == (1, 16)
    four_ranks.memory = [0.5] * 4
    with pytest.raises(UserError, match=r"nothing fits\. .* needs .* GB"):
        chosen(four_ranks, argv)


def test_other_flags_exclude_strategies(four_ranks):
    """Adafactor is an optimizer of dp."""
    four_ranks.memory = [3.5] * 4
    argv = [*GPT2, "--strategy", "auto", "--batch_size", "1", "--optim", "adafactor"]
    found, _ = chosen(four_ranks, [*argv, "--global_batch_size", "64"])
    assert found[0] == "dp"


def test_a_resumed_run_keeps_its_choice(four_ranks, tmp_path):
    # --auto_micro_batch has halved the chosen size.
    results = {"automatic": {"batch_size": 32}, "strategy": "zero2", "batch_size": 16}
    results["world_size"] = 4
    (tmp_path / "results.json").write_text(json.dumps(results))
    resumed = [*BOTH, "--output_dir", str(tmp_path), "--resume"]
    found, choice = chosen(four_ranks, resumed)
    assert found == ["zero2", 16, 1] and choice["kept"]
    four_ranks.memory[3] = 6.0  # where it does not fit, the run chooses anew
    assert chosen(four_ranks, resumed)[0][0] == "dp"
    four_ranks.memory[3] = 24.0
    # On another number of ranks it may not divide the batch.
    (tmp_path / "results.json").write_text(json.dumps({**results, "world_size": 2}))
    assert chosen(four_ranks, resumed)[0][0] == "dp"


def test_a_global_batch_determines_the_accumulation(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    training = parse_arguments(["--batch_size", "3", "--global_batch_size", "24"]).training
    assert training.gradient_accumulation_steps == 4 and training.global_batch(2) == 24
    # Both flags are valid if they agree.
    same = ["--batch_size", "3", "--global_batch_size", "24", "--gradient_accumulation_steps", "4"]
    assert parse_arguments(same).training == training


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--global_batch_size 10 --batch_size 4", "not a multiple of --batch_size 4 × 1 rank"),
        ("--global_batch_size 8 --gradient_accumulation_steps 3", "makes 2 micro-batches"),
        ("--batch_size auto", "needs --global_batch_size"),
        ("--batch_size auto --global_batch_size 8 --gradient_accumulation_steps 2", "leave"),
        ("--batch_size auto --global_batch_size 8 --rank_shares 2,1", "equal shares"),
        ("--strategy auto --eval_only", "does not train"),
        ("--strategy auto --simulate_gpus 4", "real GPUs"),
        ("--global_batch_size 8 --ds_config ds_config_stage2.json", "set it there"),
        ("--strategy auto --prove", "all strategies"),
        ("--strategy auto --fsdp_config x.json", "leave --ds_config and --fsdp_config out"),
    ],
)
def test_what_auto_excludes(flags, said):
    with pytest.raises(UserError, match=said):
        read_command_line(flags.split())


def test_the_printed_flags_are_those_of_any_number_of_ranks(monkeypatch, capsys, tmp_path):
    """The accumulation follows from --global_batch_size."""
    line = read_command_line(["--batch_size", "2", "--global_batch_size", "8"])
    monkeypatch.setattr("distributed_training.process.check_output", lambda: None)
    with pytest.raises(SystemExit):
        print_flags(line, launch=None, choose=None)
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    for world_size, steps in ((1, 4), (2, 2), (4, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        training = parse_arguments(["--config", str(tmp_path / "run.yaml")]).training
        assert training.gradient_accumulation_steps == steps


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
