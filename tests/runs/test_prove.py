"""--prove: one step, whatever the split, the strategy and the program.

That it finds a wrong accumulation is shown by the fault `mean_of_means` (test_faults.py).
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import FAULT

WAYS = 5


@pytest.fixture
def prove(script, preloaded, tmp_path):
    """prove(*args) runs --prove, whose runs are forks of a preloaded interpreter, too."""

    def run(*args, **options):
        python = sys.executable
        if preloaded:
            preloaded.for_torchrun()
            python = preloaded.python
        env = {"FAULT": f"prove:{python}"}
        done = script(*args, program=FAULT, env=env, cwd=tmp_path, **options)
        assert not list(Path(tempfile.gettempdir()).glob("distributed_training_prove_*"))
        assert not done.folder.exists() and not (tmp_path / "runs").exists()
        return done

    return run


def differences(run) -> list[list[float]]:
    """The numbers of each way except the reference: of loss, norm, gradient and update."""
    rows = re.findall(r"^(?:\d+ \w+|Trainer)[ ,].*$", run.out.partition("----")[2], re.MULTILINE)
    assert len(rows) == WAYS, run.out
    return [
        [float(n) for n in re.findall(r"\d\.\de[-+]\d\d", row)] for row in rows if "–" not in row
    ]


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Answers of 1 to 12 words, so that micro-batches have different token counts."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "the quick brown fox", "completion": " dog" * n} for n in range(1, 13)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_all_ways_make_one_step(prove):
    run = prove("--seq_length", "32", "--strategy", "zero3", "--prove")
    assert "2 ranks of zero3" in run.out and "✅ Equal" in run.out
    assert "#what-trainer-does-differently" in run.out
    for loss, norm, gradient, update in differences(run):
        assert loss < 1e-6 and norm < 1e-5 and gradient < 1e-5 and update < 1e-3


@pytest.mark.slow
def test_the_divisors_of_trainer_are_ours_on_unequal_answers(prove, small_gpt2, pairs):
    """GPT-2's class, for which Trainer counts each label, also those that are not predicted."""
    work = ["--model", small_gpt2, "--from_scratch", "--dataset", pairs, "--seq_length", "32"]
    run = prove(*work, "--train_on", "all", "--prove")
    assert "✅ Equal" in run.out
    assert all(gradient < 1e-5 for _, _, gradient, _ in differences(run))


@pytest.mark.slow
def test_adapters_on_unequal_answers(prove, llama, pairs):
    """Three ranks share twelve sequences."""
    work = ("--model", llama, "--dataset", pairs, "--lora_r", "4", "--strategy", "fsdp")
    run = prove(*work, "--prove", "3")
    assert "3 ranks of fsdp" in run.out and "✅ Equal" in run.out
    assert len(differences(run)) == WAYS - 1


@pytest.mark.parametrize(
    "flag, says",
    [
        ("--resume x", "--prove and --resume cannot be used together"),
        ("--optim sgd", "leave --optim sgd"),
    ],
)
def test_wrong_usage(script, flag, says):
    run = script(*flag.split(), "--prove", ok=False)
    assert run.code == 2 and says in run.error
