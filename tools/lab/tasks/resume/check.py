"""Task 5: was a run killed, its checkpoint damaged, and was nothing lost on other ranks?

The checkpoints remember who wrote them: a manifest has the number of ranks and the settings. A
resume renames the checkpoints after its step, the damaged one among them, to aside-step-…, and
results.json has the first step after each resume.
"""

import re
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from distributed_training import compare_runs
from distributed_training.records.recorded_run import RecordedRun
from distributed_training.run.signatures import signatures_of
from tools.lab.answers import number_of, read_answer, read_complete_run
from tools.lab.task import Place
from tools.lab.verdict import Finding, right, wrong

SAME = ("model", "seq_length", "seed", "steps", "precision")


class Saved(NamedTuple):
    """A checkpoint.

    Attributes:
        aside: whether a resume renamed it, because it continued from an earlier step.
        damage: what is wrong with its files; "" if nothing is.
        ranks, max_steps: of the run that wrote it; None if the manifest cannot be read.
    """

    step: int
    aside: bool
    damage: str
    ranks: int | None
    max_steps: int | None


def check(place: Place) -> list[Finding]:
    """Check the runs and the answer."""
    whole = read_complete_run(place.folder / "whole", "the run that is never interrupted")
    run = read_complete_run(place.folder / "run", "the run that is killed and resumed")
    answer = number_of(read_answer(place.folder / "answer.json"), "resumed_from_step")
    saved = read_checkpoints(place.folder / "run" / "checkpoints")
    resumed = resumed_from(run, saved)
    findings = [judge_interruption(run, saved), judge_losses(whole, run, resumed or 0)]
    if resumed is None:
        return findings  # no answer is right
    return [*findings, judge_answer(answer, resumed, saved)]


def read_checkpoints(folder: Path) -> list[Saved]:
    """Return the checkpoints in a folder, by their steps."""
    from distributed_training.checkpoints.verify import find_damage, read_manifest

    found = []
    for path in folder.glob("*step-*"):
        if not (name := re.fullmatch(r"(aside-)?step-(\d+)(-\d+)?", path.name)):
            continue
        manifest, damage = read_manifest(path)
        told = manifest["identity"]["told"] if manifest else {}
        damage = damage or find_damage(path, manifest)
        ranks, max_steps = told.get("ranks"), told.get("max_steps")
        found.append(Saved(int(name[2]), bool(name[1]), damage, ranks, max_steps))
    return sorted(found)


def resumed_from(run: RecordedRun, saved: list[Saved]) -> int | None:
    """Return the step after which a run was resumed; None if it was not.

    Of several resumes it is the last one before the newest checkpoint that was set aside.
    """
    starts = [one["from_step"] - 1 for one in signatures_of(run.results)[1:]]
    aside = [one.step for one in saved if one.aside]
    return max((step for step in starts if not aside or step < max(aside)), default=None)


def judge_interruption(run: RecordedRun, saved: list[Saved]) -> Finding:
    """Judge whether the run was killed, damaged, and resumed on other ranks."""
    ranks, flags = run.results["world_size"], run.results.get("flags", {})
    aside = [one for one in saved if one.aside]
    if not aside:
        if any(one.damage for one in saved):
            text = "A checkpoint is damaged, but the resume did not meet it: it was not the newest."
            return wrong("not_the_newest", text)
        if resumed_from(run, saved) is None:
            text = "This run was never resumed: it has started over, or was never interrupted."
            return wrong("started_over", text)
        text = "The run was resumed from its newest checkpoint: nothing in it was damaged."
        return wrong("nothing_damaged", text)
    newest = aside[-1]
    if not newest.damage:
        text = f"The checkpoint of step {newest.step} was left out, but it is not damaged."
        return wrong("left_out_undamaged", f"{text} Use --resume without a path.")
    save_every = flags.get("save_every")
    if save_every and newest.step % save_every:
        text = f"The checkpoint of step {newest.step} was saved at a signal, not every {save_every}"
        return wrong("stopped_not_killed", f"{text} steps: the run was asked to stop. Kill it.")
    earlier = {one.ranks for one in saved if one.step <= newest.step and one.ranks} - {ranks}
    if not earlier:
        text = f"The run was resumed on the number of ranks that it had before, {ranks}."
        return wrong("same_ranks", text)
    planned = {one.max_steps for one in saved if one.max_steps}
    if len(planned) > 1:
        text = (
            f"The first run had --max_steps {min(planned)} and ended by itself: it was not killed."
        )
        return wrong("ended_by_itself", text)
    was = ", ".join(map(str, sorted(earlier)))
    return right(f"Interrupted, step {newest.step} damaged, and continued: ranks {was} → {ranks}.")


def judge_losses(whole: RecordedRun, run: RecordedRun, resumed: int) -> Finding:
    """Judge whether the losses are those of the run that was never interrupted."""
    ours, theirs = run.results, whole.results
    if ours["global_batch_size"] != theirs["global_batch_size"]:
        sizes = [one["global_batch_size"] for one in (ours, theirs)]
        text = f"A step of the resumed run has {sizes[0]} sequences, one of the other {sizes[1]}: "
        text += "some were used twice, or left out. --batch_size is that of one rank."
        return wrong("another_global_batch", text)
    different = [key for key in SAME if ours.get(key) != theirs.get(key)]
    if different:
        return wrong("another_work", f"The two runs differ in {', '.join(different)}.")
    steps = [record["step"] for record in run.steps]
    if steps != list(range(1, len(whole.steps) + 1)):
        text = "metrics.jsonl does not have each step once: some of this run's records are lost."
        return wrong("steps_missing", text)
    if not compare_runs(whole, run).departing:
        return right(f"All {len(steps)} losses are those of the run without an interruption.")
    before, after = ([record["loss"] for record in one.steps] for one in (whole, run))
    shift = shift_of(before, after, resumed)
    if shift:
        batches, verb = abs(shift), "repeats" if shift > 0 else "leaves out"
        text = f"From step {resumed + 1} on the losses are those of other steps: the resumed run"
        name = "repeats_batches" if shift > 0 else "leaves_out_batches"
        return wrong(name, f"{text} {verb} batches ({batches} of them).")
    return wrong(
        "losses_depart",
        "The losses depart from those of the run without an interruption: compare_runs.py says "
        "from which step on, and which settings differ.",
    )


def shift_of(whole: list[float], run: list[float], resumed: int) -> int:
    """Return by how many steps the data of a resumed run is late; 0 if that explains nothing.

    Batches differ more from each other than the losses of a batch before and after a step.
    """

    def distance(shift: int) -> float:
        steps = range(resumed, len(run))
        pairs = [(run[i], whole[i - shift]) for i in steps if 0 <= i - shift < len(whole)]
        return fmean(abs(a - b) for a, b in pairs) if pairs else float("inf")

    best = min((-3, -2, -1, 1, 2, 3), key=distance)
    return best if distance(best) < distance(0) / 4 else 0


def judge_answer(answer: float, step: int, saved: list[Saved]) -> Finding:
    """Judge the step that the student read from the output.

    Args:
        step: the right one.
    """
    if answer == step:
        return right(f"It continued from step {step}: the steps after it were trained again.")
    if any(one.aside and one.step == answer for one in saved):
        text = "The answer is the step of the damaged checkpoint: which one was used in its place?"
        return wrong("damaged_step", text)
    if answer == step + 1:
        return wrong("first_step_after", "The answer is the first step after the resume.")
    return wrong("resumed_from", "The answer is not the step from which the run continued.")
