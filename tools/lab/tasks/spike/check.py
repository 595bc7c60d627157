"""Task 6: the step, the row, and a run without it."""

import json
from pathlib import Path

from distributed_training.errors import UserError
from distributed_training.files.user_files import read_user_json
from distributed_training.records.recorded_run import RecordedRun
from tools.lab.answers import number_of, read_answer, read_complete_run
from tools.lab.task import Place
from tools.lab.tasks.spike.rows import FILE, bad_line, make_rows, step_of
from tools.lab.verdict import Finding, right, wrong

SAME = ("model", "seq_length", "seed", "steps", "precision", "global_batch_size")  # of both runs


def check(place: Place) -> list[Finding]:
    """Check the answer, the replay, and the run without the row."""
    answer = read_answer(place.folder / "answer.json")
    step, line = (int(number_of(answer, key)) for key in ("step", "line"))
    run = read_complete_run(place.folder / "run", "the run with the spike")
    bad = bad_line(place.seed)
    findings = [judge_step(step, step_of(bad))]
    if not findings[0].is_right:
        return findings
    findings += [judge_replay(place.folder / "run", step), judge_line(line, bad, step)]
    if any(not finding.is_right for finding in findings):
        return findings
    try:
        clean = read_complete_run(place.folder / "clean", "the run without the row")
    except UserError as error:
        return [*findings, wrong("not_trained_without", str(error))]
    return [*findings, judge_clean(clean, step, place), *judge_work(run, clean)]


def judge_step(step: int, right_step: int) -> Finding:
    """Judge the step with the spike."""
    if step == right_step:
        return right(f"Step {step} stands out.")
    if step == right_step - 1:
        text = 'Steps count from 1, as in metrics.jsonl; "Batch 0" of the console is step 1.'
        return wrong("step_from_0", text)
    if step == right_step + 1:
        text = "This is the step after it: the update of the bad batch shows in later losses, too."
        return wrong("step_after", text)
    return wrong("another_step", f"Step {step} is no more unusual than its neighbors.")


def judge_replay(run: Path, step: int) -> Finding:
    """Judge whether the step was repeated; a guess is no evidence."""
    file = run / f"replay-{step}.json"
    if not file.is_file():
        return wrong("not_replayed", f"{file} is missing: repeat the step with --replay {step}.")
    if read_user_json("the replay", str(file)).get("equal") is not True:
        text = "The repeated step is not that of the run bit for bit: use the run's own flags."
        return wrong("replay_differs", text)
    return right("The step was repeated, bit for bit.")


def judge_line(line: int, bad: int, step: int) -> Finding:
    """Judge the line of the damaged row."""
    if line == bad:
        return right(f"Line {line} is the damaged row.")
    if abs(line - bad) == 1 and step_of(max(1, line)) != step:
        text = "This is a neighbor of the damaged line: lines count from 1, as in the replay."
        return wrong("neighbor_line", text)
    try:
        same_step = step_of(line) == step
    except ValueError:
        return wrong("no_such_line", f"{FILE} has no line {line}.")
    if same_step:
        text = f"Line {line} is in that step, but it has an ordinary share of the gradient. A row"
        return wrong("row_of_same_step", f"{text} that is only in bad company is not damaged.")
    return wrong("row_of_another_step", f"Line {line} is not used in step {step}.")


def judge_clean(clean: RecordedRun, step: int, place: Place) -> Finding:
    """Judge the run without the row: without the batch, or without the row in the data."""
    skipped = clean.results.get("skipped_steps") or []
    if skipped:
        if step not in skipped:
            text = f"The run leaves out the steps {skipped}, and still trains on step {step}."
            return wrong("skipped_another_step", text)
        if len(skipped) > 1:
            text = f"The run leaves out {len(skipped)} steps: one was enough."
            return wrong("skipped_too_much", text)
        if any(record["step"] == step for record in clean.steps):
            return wrong("trained_on_it", f"The run's records still have step {step}.")
        return right(f"The run continued without the batch of step {step}.")
    file = Path(str(clean.results.get("flags", {}).get("dataset", "")))
    if not file.is_file():
        return wrong("data_missing", f"The data of this run, {file}, is not there any more.")
    return judge_rows(file, place)


def judge_work(run: RecordedRun, clean: RecordedRun) -> list[Finding]:
    """Return what else differs between the runs; nothing if only the row does."""
    values = {key: [one.results.get(key) for one in (run, clean)] for key in SAME}
    values["lr"] = [one.results.get("flags", {}).get("lr") for one in (run, clean)]
    texts = [f"{key} ({a} and {b})" for key, (a, b) in values.items() if a != b]
    if not texts:
        return []
    text = f"The runs in run and clean differ in {', '.join(texts)}: only the row may differ."
    return [wrong("another_work", text)]


def judge_rows(file: Path, place: Place) -> Finding:
    """Judge the data of a run: all rows but the damaged one."""
    try:
        found = [json.dumps(json.loads(x)) for x in file.read_text().splitlines() if x.strip()]
    except ValueError:
        return wrong("data_unreadable", f"{file} has a line that is not JSON.")
    rows = [json.dumps(row) for row in make_rows(place.seed)]
    damaged = rows.pop(bad_line(place.seed) - 1)
    if damaged in found:
        text = f"The run in clean was trained on {file}, which still has the damaged row."
        return wrong("trained_on_it", text)
    if len(found) < len(rows):
        count = len(rows) - len(found)
        return wrong("removed_too_much", f"{file} lacks {count} other rows: those were good.")
    if sorted(found) != sorted(rows):
        return wrong("changed_rows", f"{file} has other rows than {FILE} without the damaged one.")
    return right("The run was trained on all rows but the damaged one.")
