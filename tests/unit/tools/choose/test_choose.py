"""--strategy auto and --batch_size auto: the first candidate that fits every rank."""

import json
from types import SimpleNamespace

import pytest
import torch

from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.memory.fit import Limits
from distributed_training.ranks.context import Nodes
from distributed_training.units import GB
from tools.choose import candidates, choose

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
        **{"device": torch.device("cpu"), "capability": (0, 0), "nodes": Nodes(1, (0,) * 4)},
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
