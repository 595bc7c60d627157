"""Task 5: the solution passes; runs that were not interrupted, or that lost something, are named."""

import fcntl

import pytest
from written_runs import RESULTS, save, steps

from distributed_training.errors import UserError
from distributed_training.records.recorded_run import read_run
from tools.lab.answers import read_complete_run
from tools.lab.task import Place
from tools.lab.tasks.resume import check
from tools.lab.tasks.resume.check import Saved

# Batches that differ, as real ones do: their losses tell which batch a step had.
LOSSES = [8 - 0.1 * step + 0.5 * (step * 7 % 5) for step in range(20)]
OK, DAMAGED = "", "a file is damaged"
KILLED = [
    Saved(5, False, OK, 1, 20),
    Saved(10, False, OK, 2, 20),
    Saved(10, True, DAMAGED, 1, 20),
    Saved(15, False, OK, 2, 20),
]


def signatures(*first_steps):
    """What results.json has of starts whose first steps are these."""
    parts = {"hard": {}, "soft": {}, "told": {}}
    return [{"from_step": step, **parts} for step in first_steps]


@pytest.fixture
def runs(tmp_path):
    """runs(losses, **results) writes the whole run, and one that was resumed on two ranks."""

    def write(losses=LOSSES, **changed):
        own = {"steps": 20, "flags": {"save_every": 5, "max_steps": 20}}
        whole = save(tmp_path / "whole", RESULTS | own | {"world_size": 1}, steps(LOSSES))
        own["signatures"] = signatures(1, 6)
        records = steps(losses)
        if "missing" in changed:
            del records[changed.pop("missing")]
        run = save(tmp_path / "run", RESULTS | own | {"world_size": 2} | changed, records)
        return read_run(whole), read_run(run)

    return write


def test_the_solution_passes(runs):
    whole, run = runs()
    assert check.judge_interruption(run, KILLED).is_right
    assert check.resumed_from(run, KILLED) == 5
    assert check.judge_losses(whole, run, 5).is_right
    assert check.judge_answer(5, 5, KILLED).is_right


@pytest.mark.parametrize(
    ("first_steps", "saved", "step"),
    [
        ([1, 6], [Saved(5, False, OK, 1, 20), Saved(10, True, DAMAGED, 1, 20)], 5),  # same ranks
        ([1, 6, 13], KILLED, 5),  # the resumed run was stopped, and resumed
        ([1, 11], [Saved(5, False, OK, 1, 20), Saved(10, False, OK, 1, 20)], 10),  # no damage
        ([1], KILLED[:1], None),
    ],
)
def test_the_step_of_the_resume_does_not_depend_on_the_ranks(runs, first_steps, saved, step):
    _, run = runs(signatures=signatures(*first_steps), world_size=1)
    assert check.resumed_from(run, saved) == step


def test_what_a_resume_on_the_same_ranks_leaves_is_one_mistake(runs, tmp_path, monkeypatch):
    """The answer is judged by the step of that resume; without a resume no answer is judged."""
    (tmp_path / "answer.json").write_text('{"resumed_from_step": 5}')
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    one_rank = [one._replace(ranks=1) for one in KILLED]
    monkeypatch.setattr(check, "read_checkpoints", lambda folder: one_rank)
    runs(world_size=1)
    assert [one.name for one in check.check(Place(tmp_path, 0))] == ["same_ranks", "", ""]
    undamaged = [one for one in one_rank if not one.aside]
    monkeypatch.setattr(check, "read_checkpoints", lambda folder: undamaged)
    assert [one.name for one in check.check(Place(tmp_path, 0))] == ["nothing_damaged", "", ""]
    runs(world_size=1, signatures=signatures(1))
    assert [one.name for one in check.check(Place(tmp_path, 0))] == ["started_over", ""]


def test_a_killed_run_does_not_count_as_running(runs, tmp_path):
    runs(status="running")
    with pytest.raises(UserError, match="was interrupted, and has not been resumed"):
        read_complete_run(tmp_path / "run", "a run")
    with open(tmp_path / "run" / ".lock", "w") as lock:
        with pytest.raises(UserError, match="was interrupted"):  # the file stays after kill -9
            read_complete_run(tmp_path / "run", "a run")
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="is running"):
            read_complete_run(tmp_path / "run", "a run")


@pytest.mark.parametrize(
    ("saved", "name"),
    [
        ([Saved(5, False, OK, 1, 20), Saved(15, False, OK, 2, 20)], "nothing_damaged"),
        ([Saved(5, False, DAMAGED, 1, 20), Saved(15, False, OK, 2, 20)], "not_the_newest"),
        ([*KILLED[:2], Saved(10, True, OK, 1, 20)], "left_out_undamaged"),
        ([Saved(5, False, OK, 2, 20), Saved(10, True, DAMAGED, 2, 20)], "same_ranks"),
        ([KILLED[0], Saved(12, True, DAMAGED, 1, 20)], "stopped_not_killed"),
        (
            [Saved(5, False, OK, 1, 10), Saved(10, True, DAMAGED, 1, 10), KILLED[3]],
            "ended_by_itself",
        ),
    ],
)
def test_a_run_that_was_not_interrupted_so_is_named(runs, saved, name):
    assert check.judge_interruption(runs()[1], saved).name == name


def test_a_run_that_started_over_is_named(runs):
    saved = [Saved(n, False, OK, 2, 20) for n in (5, 10, 15, 20)]
    _, run = runs(signatures=signatures(1))
    assert check.judge_interruption(run, saved).name == "started_over"


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"global_batch_size": 4}, "another_global_batch"),
        ({"seed": 2}, "another_work"),
        ({"missing": 7}, "steps_missing"),
        # The batch of step 5 again; and without the batch of step 6.
        ({"losses": [*LOSSES[:5], *(x + 0.01 for x in LOSSES[4:-1])]}, "repeats_batches"),
        ({"losses": [*LOSSES[:5], *(x + 0.01 for x in LOSSES[6:]), 9.0]}, "leaves_out_batches"),
        ({"losses": [*LOSSES[:5], *(x + 0.02 for x in LOSSES[5:])]}, "losses_depart"),
    ],
)
def test_a_run_that_lost_something_is_named(runs, changed, name):
    assert check.judge_losses(*runs(**changed), 5).name == name


@pytest.mark.parametrize(
    ("answer", "name"), [(10, "damaged_step"), (6, "first_step_after"), (0, "resumed_from")]
)
def test_a_wrong_answer_is_named(answer, name):
    assert check.judge_answer(answer, 5, KILLED).name == name
