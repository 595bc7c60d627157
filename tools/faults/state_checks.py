"""Checks of the model states: resumed runs, exported models, counts and memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from distributed_training.files.json_types import JsonObject
from distributed_training.records.agreement import TOLERANCES, relative
from tools.faults.bench import Bench, Launch
from tools.faults.checks import verdict_of_comparison
from tools.faults.fault import Finding

# Of the planned and the measured bytes of a model state; docs/PLAN.md, "On a CPU".
STATE_TOLERANCE = 0.02
KEYS = ("prompt", "completion")  # of a row


@dataclass(frozen=True)
class Resume:
    """A run that saves a checkpoint and continues, and a second run that resumes from it.

    The steps that both have in common must be equal: scripts/compare_runs.py decides.

    Args:
        first: saves a checkpoint after the step `saved`, and continues to the end.
        second: resumes from that checkpoint, in a folder of its own.
    """

    first: Launch
    second: Launch
    saved: int

    command = "python scripts/compare_runs.py A B"
    about = "where B is a run with --resume from a checkpoint of A"

    def __call__(self, bench: Bench) -> Finding:
        """Make both runs, and compare the steps in common."""
        whole = Launch(f"{self.first.flags} --save_every {self.saved}", self.first.ranks)
        uninterrupted = bench.train(whole)
        checkpoint = uninterrupted / "checkpoints" / f"step-{self.saved:08d}"
        # Relative to the bench's folder, where programs run: the comparison quotes it.
        checkpoint = checkpoint.relative_to(bench.folder)
        resumed = Launch(f"{self.second.flags} --resume {checkpoint}", self.second.ranks)
        folders = [uninterrupted, bench.train(resumed)]
        ended = bench.run("scripts/compare_runs.py", *folders)
        return verdict_of_comparison(ended.code, ended.output)


@dataclass(frozen=True)
class Reload:
    """The exported model, loaded from its folder and evaluated again: the loss must be equal.

    Args:
        launch: trains, evaluates and exports.
        data: the flags of the data, with which the exported model is evaluated.
    """

    launch: Launch
    data: str

    command = "python real_model_example.py --eval_only --model OUTPUT_DIR/hf"
    about = "whose loss must be that of the run's last evaluation"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the loss of the trained model with that of the exported one."""
        trained = bench.train(self.launch)
        exported = Launch(f"--model {trained / 'hf'} --eval_only {self.data}")
        losses = [results_of(folder)["eval_loss"] for folder in (trained, bench.train(exported))]
        difference = relative(*losses)
        evidence = f"loss {losses[0]:.6f} trained, {losses[1]:.6f} exported"
        caught = difference > TOLERANCES["fp32"].loss
        return Finding(caught, "--eval_only", None, f"{evidence} ({difference:.1e})")


@dataclass(frozen=True)
class CountedTokens:
    """The tokens of an epoch, as results.json has them, against those that a tokenizer counts."""

    launch: Launch  # trains one epoch on all rows
    seq_length: int

    command = "python real_model_example.py --epochs 1"
    about = "whose results.json must have the tokens of all rows"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the number of tokens."""
        counted = results_of(bench.train(self.launch))["tokens"]
        known = self._tokens_of_rows(bench)
        evidence = f"{counted:,} tokens in results.json, {known:,} in the rows"
        return Finding(counted != known, "results.json", None, evidence)

    def _tokens_of_rows(self, bench: Bench) -> int:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(bench.files["model"] / "tokenizer.json"))
        lines = bench.files["pairs"].read_text(encoding="utf-8").splitlines()
        rows, known = map(json.loads, lines), 0
        for row in rows:
            prompt, answer = (len(tokenizer.encode(row[key]).ids) for key in KEYS)
            if prompt < self.seq_length:  # otherwise it is left out, because no answer is left
                known += min(prompt + answer + 1, self.seq_length)  # 1: the end token
        return known


@dataclass(frozen=True)
class CountedParameters:
    """The number of parameters in results.json against the numbers in the exported file."""

    launch: Launch  # trains and exports

    command = "python real_model_example.py"
    about = "whose results.json must have the parameters of the exported file"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the number of parameters."""
        from safetensors.torch import load_file

        folder = bench.train(self.launch)
        weights = load_file(folder / "hf" / "model.safetensors")
        known = sum(weight.numel() for weight in weights.values())
        counted = results_of(folder)["parameters"]
        evidence = f"{counted:,} parameters in results.json, {known:,} in the exported file"
        return Finding(counted != known, "results.json", None, evidence)


@dataclass(frozen=True)
class PlannedStates:
    """The memory of the model states against the plan, both in results.json."""

    launch: Launch

    command = "python real_model_example.py"
    about = "whose results.json has the measured memory and the plan"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the bytes of parameters, gradients and optimizer states."""
        memory = results_of(bench.train(self.launch))["memory"]
        ranks, plan = memory["device_categories_bytes_by_rank"], memory["predicted_bytes"]
        states = {
            name: (max(rank[name] for rank in ranks), plan[name])
            for name in ("parameters", "gradients", "optimizer")
        }
        name = max(states, key=lambda name: relative(states[name][1], states[name][0]))
        measured, planned = states[name]
        caught = relative(planned, measured) > STATE_TOLERANCE
        evidence = f"{name}: {measured:,} bytes, planned {planned:,}"
        return Finding(caught, "results.json", None, evidence)


def results_of(folder: Path) -> JsonObject:
    """Return the results of a run."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))
