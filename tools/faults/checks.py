"""The checks: what a user runs. The project's own verdicts and tolerances decide."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from dataclasses import dataclass

from distributed_training.errors import TrainingError
from tools.faults.bench import END, Bench, Launch
from tools.faults.fault import Finding

# A global batch of 8 sequences on 37: four whole steps, then one of 5, whose micro-batches are
# short. Two epochs make 10 steps. All of them are the same work for every split and strategy.
WORK = """--model {model} --from_scratch --dataset {pairs} --seq_length 64 --num_samples 37
    --epochs 2 --eval_samples 9 --lr 1e-3 --precision fp32 --no_export"""
WORK = " ".join(WORK.split())
EXACT = f"{WORK} --dropout 0"
WHOLE = Launch(f"{EXACT} --batch_size 8")  # one process, without accumulation
SPLIT = f"{EXACT} --batch_size 1 --gradient_accumulation_steps 4"
DP, ZERO2, FSDP = (Launch(f"{SPLIT} --strategy {name}", 2) for name in ("dp", "zero2", "fsdp"))
# The runs of the figure.
LONG = Launch(
    "--model {model} --from_scratch --dataset {pairs} --seq_length 64 --max_steps 100 --lr 3e-3 "
    "--precision fp32 --no_export --no_eval --dropout 0 --batch_size 1 "
    "--gradient_accumulation_steps 4",
    2,
)
DROPOUT = Launch(f"{WORK} --dropout 0.1 --batch_size 8")
CHECKPOINTED = Launch(f"{WORK} --dropout 0.1 --batch_size 8 --gradient_checkpointing")
# All 144 examples in one batch, so that a step has the same ones with and without --packing.
UNPACKED = Launch(
    "--model {model} --from_scratch --dataset {pairs} --seq_length 64 --epochs 4 --lr 1e-3 "
    "--precision fp32 --no_export --dropout 0 --batch_size 144"
)
PACKED = Launch(f"{UNPACKED.flags} --packing")
# A learning rate whose updates bf16 cannot add to most weights, and steps enough to see it.
FP32, BF16 = (
    Launch(
        "--model {model} --from_scratch --dataset {pairs} --seq_length 64 --max_steps 120 "
        f"--lr 1e-4 --no_export --no_eval --dropout 0 --batch_size 8 --precision {precision}"
    )
    for precision in ("fp32", "bf16")
)
UNTRAINED = Launch(f"{EXACT} --batch_size 2".replace("--lr 1e-3", "--lr 1e-20"))


@dataclass(frozen=True)
class Compare:
    """Two runs of the same work, compared step by step by scripts/compare_runs.py."""

    first: Launch
    second: Launch
    what: str  # what the runs are

    command = "python scripts/compare_runs.py A B"

    @property
    def about(self) -> str:
        """What the runs are."""
        return f"where {self.what}"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the runs; the exit code is the verdict."""
        folders = [bench.train(launch) for launch in (self.first, self.second)]
        ended = bench.run("scripts/compare_runs.py", *folders)
        return verdict_of_comparison(ended.code, ended.output)


def verdict_of_comparison(code: int, output: str) -> Finding:
    """Return what scripts/compare_runs.py found, according to its exit code.

    Raises:
        TrainingError: it could not compare the runs.
    """
    by = "scripts/compare_runs.py"
    said = " ".join(sentence(output, ("❌", "✅", "ℹ️")).split())
    steps = [int(step) for step in re.findall(r"from step (\d+)", said)]
    if code not in (0, 1) or (code == 1 and not steps):
        raise TrainingError(f"{by} did not compare the runs: {output[-500:]}")
    return Finding(code == 1, by, min(steps) if code else None, said)


def sentence(output: str, marks: tuple[str, ...]) -> str:
    """Return the first paragraph of an output that begins with one of the marks."""
    paragraphs = (text.strip() for text in output.split("\n\n"))
    return next((text for text in paragraphs if text.startswith(marks)), "")


@dataclass(frozen=True)
class Prove:
    """--prove: one step, made in five ways, two of which are by transformers.Trainer."""

    flags: str = (
        "--model {model} --from_scratch --dataset {pairs} --seq_length 64 --strategy zero2 "
        "--weight_decay 0.1"
    )

    command = "python real_model_example.py --prove"
    about = "which makes a step in five ways, two of them with transformers.Trainer"

    def __call__(self, bench: Bench) -> Finding:
        """Make the step; the exit code is the verdict."""
        # The tests' starter gives --prove the fast interpreter.
        env = {"FAULT_SCRIPT": str(bench.project / "real_model_example.py")}
        env["FAULT"] = f"prove:{bench.python}"
        words = bench.words(Launch(self.flags))
        ended = bench.run("tests/helpers/fault.py", *words, "--prove", env=env)
        lines = [line for line in ended.output.splitlines() if re.match("❌|✅ Equal", line)]
        if not lines or (ended.code != 0 and "not equal" not in lines[0]):
            raise TrainingError(f"--prove failed: {ended.output[-500:]}")
        return Finding(ended.code == 1, "--prove", 1 if ended.code else None, lines[0])


@dataclass(frozen=True)
class SampleTrainsTheAnswer:
    """--show_sample: the trained tokens are those of the answer, up to its end token."""

    command = "python real_model_example.py --show_sample"
    about = "whose marked tokens must be an answer with its end token"

    def __call__(self, bench: Bench) -> Finding:
        """Read the marks of the first training sequence."""
        flags = "--model {model} --from_scratch --dataset {pairs} --seq_length 64 --show_sample"
        ended = bench.run("real_model_example.py", *bench.words(Launch(flags)))
        tokens = re.findall(r"^ *\d+ +\d+ ([* ]) (['\"].*)$", ended.output, re.MULTILINE)
        if ended.code or not tokens:
            raise TrainingError(f"--show_sample failed: {ended.output[-500:]}")
        trained = "".join(literal_eval(text) for mark, text in tokens if mark == "*")
        rows = map(json.loads, bench.files["pairs"].read_text(encoding="utf-8").splitlines())
        is_answer = trained in {f"{row['completion']}{END}" for row in rows}
        return Finding(not is_answer, "--show_sample", None, f"trained: {trained!r}")


@dataclass(frozen=True)
class EpochsAtRateZero:
    """Two epochs at a learning rate of almost 0: a step's loss depends on its sequences only.

    Each epoch has the same sequences, so the means of the epochs are equal; their order is new, so
    the losses of the steps are not.
    """

    launch: Launch = UNTRAINED

    command = "python real_model_example.py --epochs 2 --lr 1e-20"
    about = "where the losses of the second epoch must not be those of the first"

    def __call__(self, bench: Bench) -> Finding:
        """Compare the losses of the epochs."""
        lines = (bench.train(self.launch) / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if "loss" in record]
        epochs = [[r["loss"] for r in records if r["epoch"] == number] for number in (1, 2)]
        steps = [n for n, (a, b) in enumerate(zip(*epochs, strict=False), 1) if a == b]
        repeated = len(steps) == len(epochs[0]) > 1
        step = records[len(epochs[0])]["step"] if repeated else None
        evidence = f"{len(steps)} of the {len(epochs[0])} losses of epoch 1 come again in epoch 2"
        return Finding(repeated, "metrics.jsonl", step, evidence)


def _and_two_ranks(launch: Launch, strategy: str) -> Compare:
    what = f"two ranks of {strategy} with four micro-batches of 1 each"
    return Compare(WHOLE, launch, f"A is one process with a batch of 8, and B {what}")


MUON, MUON_ZERO3 = (
    Launch(f"{EXACT} --batch_size {batch_size} --optim muon --strategy {name}", ranks)
    for name, batch_size, ranks in (("dp", 8, 1), ("zero3", 4, 2))
)
ONE_AND_MUON = Compare(
    MUON, MUON_ZERO3, "both have --optim muon, A is one process, and B two ranks of zero3"
)
ONE_AND_DP, ONE_AND_FSDP = _and_two_ranks(DP, "dp"), _and_two_ranks(FSDP, "fsdp")
WITH_CHECKPOINTING = Compare(
    DROPOUT, CHECKPOINTED, "A has dropout, and B also --gradient_checkpointing"
)
FP32_AND_BF16 = Compare(FP32, BF16, "A is in fp32, and B in bf16")
WITH_PACKING = Compare(UNPACKED, PACKED, "all examples are one batch, and B has --packing")
