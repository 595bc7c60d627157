"""Task 3: each change fits the script, and wrong runs and answers are named."""

import ast
import json

import pytest
from conftest import PROJECT
from written_runs import LOSSES, RESULTS, save, steps

from distributed_training.records.recorded_run import read_run
from tools.lab.task import Place
from tools.lab.tasks.fault import check, loops

DIGESTS = {"reference": "0", "a": "1", "b": "2", "c": "3"}
CHANGES = {"a": "loss_in_fp64", "b": "mean_of_means", "c": "cleared_before_the_step"}
OTHER = [loss * 1.01 for loss in LOSSES]


@pytest.fixture
def runs(tmp_path):
    """runs(b={...}) writes the four runs, of which b departs; `losses` and results can change."""

    def write(**changes):
        found = {}
        for name in DIGESTS:
            own = {} if name == "reference" else {"gradient_accumulation_steps": 2}
            own |= {"code_digest": DIGESTS[name]} | changes.get(name, {})
            losses = own.pop("losses", OTHER if name == "b" else LOSSES)
            found[name] = read_run(save(tmp_path / name, RESULTS | own, steps(losses)))
        return found

    return write


@pytest.mark.parametrize("name", sorted(loops.FAULTS | loops.HARMLESS))
def test_each_change_fits_the_script(name):
    script = (PROJECT / loops.SCRIPT).read_text()
    changed = loops.changed(script, name)
    ast.parse(changed)
    before, after = (set(text.splitlines()) for text in (script, changed))
    assert changed != script and len(after - before) <= 3
    # In the loop of plain PyTorch, which dp uses.
    begin, end = (text.split("def train_epoch_deepspeed") for text in (script, changed))
    assert begin[1] == end[1]


def test_every_student_gets_one_fault_and_two_harmless_changes():
    found = [loops.drawn(seed) for seed in range(50)]
    for changes in found:
        assert len(loops.FAULTS.keys() & changes.values()) == 1 and len({*changes.values()}) == 3
    faulty = {(x, name) for changes in found for x, name in changes.items() if name in loops.FAULTS}
    assert len({x for x, _ in faulty}) == 3 and len({name for _, name in faulty}) == 4


def test_the_solution_passes(runs):
    assert check.judge_runs(runs(), DIGESTS).is_right
    assert check.judge_answer("b", "mean_of_means", CHANGES).is_right


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"a": {"code_digest": "2"}}, "another_loop"),
        ({"c": {"code_digest": "9"}}, "another_loop"),
        ({"c": {"global_batch_size": 4}}, "another_work"),
        ({"a": {"dataset": {"name": "d", "sha256": "y"}}}, "another_work"),
        ({"a": {"losses": OTHER}}, "several_depart"),
        ({"b": {"losses": LOSSES}}, "data_cannot_show_it"),
        ({"b": {"losses": LOSSES, "world_size": 1}}, "split_cannot_show_it"),
        ({"b": {"losses": LOSSES, "gradient_accumulation_steps": 1}}, "split_cannot_show_it"),
    ],
)
def test_runs_that_prove_nothing_are_named(runs, changes, name):
    assert check.judge_runs(runs(**changes), DIGESTS).name == name


@pytest.mark.parametrize(
    ("loop", "fault", "name"),
    [
        ("a", "mean_of_means", "harmless_loop"),
        ("c", "cleared_before_the_step", "harmless_loop"),
        ("b", "loss_in_fp64", "harmless_change"),
        ("b", "divided_by_the_ranks", "another_fault"),
    ],
)
def test_a_wrong_answer_is_named(loop, fault, name):
    assert check.judge_answer(loop, fault, CHANGES).name == name


def test_the_exchange_after_each_micro_batch_is_explained():
    """In task 2 a sum after each micro-batch is a mistake, here the mean of DDP is harmless."""
    changes = CHANGES | {"c": "every_micro_batch_exchanged"}
    answers = [("b", "mean_of_means"), ("c", "mean_of_means"), ("b", "every_micro_batch_exchanged")]
    for answer in answers:
        assert "DDP averages" in check.judge_answer(*answer, changes).text
    assert "DDP" not in check.judge_answer("b", "mean_of_means", CHANGES).text


def test_without_runs_the_answer_is_not_judged(tmp_path):
    (tmp_path / "answer.json").write_text(json.dumps({"faulty": "a", "fault": ""}))
    (finding,) = check.check(Place(tmp_path, 0))
    assert finding.name == "not_run" and "runs/reference" in finding.text
