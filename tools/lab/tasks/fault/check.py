"""Task 3: do the runs show which loop has the fault, and is the answer the one that they show?

The runs are judged by the project's own comparison: its tolerances decide what differs.
"""

import subprocess
import sys
from pathlib import Path

from distributed_training import compare_runs
from distributed_training.errors import TrainingError, UserError
from distributed_training.process import code_digest
from distributed_training.records.recorded_run import RecordedRun
from tools.lab.answers import choice_of, read_answer, read_complete_run
from tools.lab.task import Place
from tools.lab.tasks.fault.loops import FAULTS, HARMLESS, LOOPS, drawn
from tools.lab.verdict import Finding, right, wrong

REFERENCE = "reference"
SAME = ("model", "global_batch_size", "seq_length", "seed", "steps", "precision", "samples")
EXCHANGED = "every_micro_batch_exchanged"
WHY_HARMLESS = (  # measured in a hook of DDP: a bucket has the accumulated gradients
    f" {EXCHANGED} changes nothing, although a sum after each micro-batch is a mistake in task 2: "
    "DDP averages, and the mean of what all ranks have already averaged is the same again. It "
    "costs time only."
)
DIGEST = "from distributed_training.process import code_digest; print(code_digest())"


def check(place: Place) -> list[Finding]:
    """Check the runs; then the answer."""
    answer = read_answer(place.folder / "answer.json")
    runs: dict[str, RecordedRun] = {}
    for name in (REFERENCE, *LOOPS):
        try:
            runs[name] = read_complete_run(place.folder / "runs" / name, f"the run of {name}")
        except UserError as error:
            return [wrong("not_run", str(error))]
    digests = {REFERENCE: code_digest(), **{x: digest_of(place.folder / x) for x in LOOPS}}
    runs_found = judge_runs(runs, digests)
    if not runs_found.is_right:
        return [runs_found]
    faulty = choice_of(answer, "faulty", list(LOOPS))
    fault = choice_of(answer, "fault", [*FAULTS, *HARMLESS])
    return [runs_found, judge_answer(faulty, fault, drawn(place.seed))]


def digest_of(copy: Path) -> str:
    """Return the digest that a run of a copy of the project records."""
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise TrainingError(f"{copy} is no longer complete: remove its folder, and start again.")
    return done.stdout.strip()


def judge_runs(runs: dict[str, RecordedRun], digests: dict[str, str]) -> Finding:
    """Judge whether the runs are of the loops, do the same work, and show a fault."""
    for name, run in runs.items():
        if run.results.get("code_digest") != digests[name]:
            whose = next((n for n in digests if digests[n] == run.results.get("code_digest")), "")
            of = f"of {whose}" if whose else "of another program"
            text = (
                f"The run in runs/{name} is {of}. Which script did you start, and has it changed?"
            )
            return wrong("another_loop", text)
    first = runs[REFERENCE].results
    for name in LOOPS:
        own = runs[name].results
        different = [key for key in SAME if own.get(key) != first.get(key)]
        if own["dataset"].get("sha256") != first["dataset"].get("sha256"):
            different.append("dataset")
        if different:
            values = ", ".join(f"{key} {first.get(key)} → {own.get(key)}" for key in different)
            return wrong("another_work", f"{name} does not do the work of the reference: {values}.")
    comparison = compare_runs(*(runs[name] for name in (REFERENCE, *LOOPS)))
    departing = [LOOPS[ord(run.name) - ord("B")] for run in comparison.departing]
    if not departing:
        return explain_silence(runs)
    if len(departing) > 1:
        text = (
            f"{' and '.join(departing)} differ from the reference, and only one loop has a fault."
        )
        return wrong(
            "several_depart", f"{text} Without --dropout 0 other ranks draw other random numbers."
        )
    return right("The four runs do the same work, and one of them departs from the reference.")


def explain_silence(runs: dict[str, RecordedRun]) -> Finding:
    """Say why runs agree although one of the loops has a fault."""
    of_loops = [runs[name].results for name in LOOPS]
    few_ranks = any(own["world_size"] < 2 for own in of_loops)
    few_batches = any(own["gradient_accumulation_steps"] < 2 for own in of_loops)
    if few_ranks or few_batches:
        missing = "one rank" if few_ranks else "one micro-batch"
        return wrong(
            "split_cannot_show_it",
            f"All losses agree, but some of these runs have {missing}. A fault of what ranks or "
            "micro-batches do together does not exist there: a test that cannot fail proves "
            "nothing.",
        )
    return wrong(
        "data_cannot_show_it",
        "All losses agree. Some faults are invisible if all sequences have the same number of "
        "tokens: does the dataset of these runs have different ones?",
    )


def judge_answer(faulty: str, fault: str, changes: dict[str, str]) -> Finding:
    """Judge the letter and the name of the fault."""
    if changes[faulty] in HARMLESS:
        why = WHY_HARMLESS if changes[faulty] == EXCHANGED else ""
        text = f"{faulty} has a change, but its run agrees with the reference: it is harmless.{why}"
        return wrong("harmless_loop", text)
    if fault == changes[faulty]:
        why = WHY_HARMLESS if EXCHANGED in changes.values() else ""
        return right(f"{faulty} has the fault, and it is {fault}.{why}")
    if fault in HARMLESS:
        why = WHY_HARMLESS if fault == EXCHANGED else ""
        text = f"{faulty} has the fault. But {fault} changes nothing: why does {faulty} depart?"
        return wrong("harmless_change", f"{text}{why}")
    text = f"{faulty} has the fault, but its change does something else than {fault}."
    return wrong("another_fault", text)
