"""scripts/compare_runs.py: what is read of two runs, and what is said about their difference."""

import json
import math

import pytest

from support.errors import UserError
from support.report.divergence import answer, as_json, as_text, compare_runs, read_run

LOSSES = [8.0, 7.5, 7.0, 6.5, 6.0, 5.5]


def step(number, loss, lr=1e-3):
    return {"step": number, "epoch": 1, "loss": loss, "lr": lr}


def signature(**soft):
    return {"hard": {"parameters": 10}, "soft": {"dataset": "a" * 64} | soft, "told": {}}


@pytest.fixture
def ours(tmp_path):
    """ours(name, records, **results) writes an output folder; `flags` and `soft` have defaults."""

    def write(name, records, flags=None, soft=None, **results):
        folder = tmp_path / name
        folder.mkdir()
        facts = {"status": "completed", "precision": "fp32", "device": "cpu", "world_size": 1}
        facts |= {"flags": flags or {"eval": True}, "run_signature": signature(**(soft or {}))}
        (folder / "results.json").write_text(json.dumps(facts | results))
        lines = [json.dumps(record) + "\n" for record in records]
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return write


@pytest.fixture
def trainers(tmp_path):
    """trainers(name, losses by step) writes the trainer_state.json of a checkpoint."""

    def write(name, losses):
        folder = tmp_path / name / "checkpoint-6"
        folder.mkdir(parents=True)
        history = [{"step": end, "loss": loss, "epoch": 0.1} for end, loss in losses.items()]
        history.append({"step": 6, "train_loss": 7.0, "train_runtime": 1.0})
        state = {"global_step": 6, "max_steps": 6, "log_history": history}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        return tmp_path / name

    return write


def steps(losses=LOSSES, first=1, lr=1e-3):
    return [step(number, loss, lr) for number, loss in enumerate(losses, first)]


def compared(a, b, tolerance=1e-6):
    return compare_runs(read_run(a), read_run(b), tolerance)


def first_of(found):
    return found.first(found.points)


def test_every_flag_has_an_effect():
    from support.checkpoints.compatibility import INFORMATIONAL_FLAGS
    from support.cli.parse import parse_arguments
    from support.cli.run_file import NOT_SHOWN
    from support.report.effects import EFFECTS

    flags = {*vars(parse_arguments([])), *INFORMATIONAL_FLAGS} - {*NOT_SHOWN}
    assert not flags - EFFECTS.keys()


def test_equal_runs(ours):
    found = compared(ours("a", steps()), ours("b", steps([loss * (1 + 1e-7) for loss in LOSSES])))
    assert found.equal and not found.causes and len(found.points) == 6
    assert max(point.relative for point in found.points) == pytest.approx(1e-7, rel=0.01)


def test_a_learning_rate_that_differs_later_is_the_cause(ours):
    """The seed differs, too; but it would have changed the first step."""
    b = [*steps(LOSSES[:3]), *steps([6.5, 6.1, 5.7], first=4, lr=9e-4)]
    flags = [{"lr_scheduler": "linear", "run_name": "x"}, {"lr_scheduler": "cosine", "seed": 1}]
    found = compared(ours("a", steps(), flags[0]), ours("b", b, flags[1]))
    assert first_of(found).last == 5 and not found.equal
    assert [entry.name for entry in found.causes] == ["lr_scheduler", "seed"]
    changes = {entry.name: entry.effect.on for entry in found.differences}
    assert changes == {"lr_scheduler": "losses", "seed": "losses", "run_name": "nothing"}


def test_equal_losses_have_no_cause(ours):
    found = compared(*(ours(name, steps(), {"seed": name}) for name in "ab"))
    assert found.equal and found.differences and not as_json(found)["likely_causes"]


def test_equal_learning_rates_are_no_cause(ours):
    """A longer run with a constant rate."""
    b = ours("b", steps([*LOSSES, 5.0, 4.5]), {"max_steps": 8})
    found = compared(ours("a", steps(), {"max_steps": 6}), b)
    assert found.equal and not found.causes and len(found.points) == 6
    assert "1 to 6" in as_text(found) and "1 to 8" in as_text(found)


def test_other_data_is_the_cause(ours):
    b = steps([9.0, *LOSSES[1:]])
    found = compared(ours("a", steps()), ours("b", b, soft={"dataset": "b" * 64}))
    assert first_of(found).last == 1
    assert [entry.name for entry in found.causes] == ["data digest"]


@pytest.mark.parametrize("size, explained", [(5e-5, True), (1e-2, False)])
def test_a_strategy_explains_rounding_only(ours, size, explained):
    b = ours("b", steps([*LOSSES[:5], 5.5 * (1 + size)]), strategy="zero2")
    found = compared(ours("a", steps(), strategy="dp"), b)
    assert first_of(found).last == 6 and not found.causes
    assert ("Likely cause: rounding" in answer(found)) == explained


def test_nan(ours):
    """null in metrics.jsonl; equal only to itself."""
    a = ours("a", steps([8.0, None, None]))
    assert compared(a, ours("b", steps([8.0, None, None]))).equal
    found = compared(a, ours("c", steps([8.0, None, 7.0])))
    assert first_of(found).last == 3 and math.isinf(first_of(found).relative)


def test_truncated_and_repeated_lines(ours):
    """A run that was killed, and one that repeats the steps after its checkpoint."""
    a, b = ours("a", steps()), ours("b", [*steps([8.0, 7.5, 1.0, 1.0]), *steps(LOSSES[2:], 3)])
    with open(a / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 5.')
    found = compared(a, b)
    assert found.equal and len(found.points) == 6


def test_a_run_that_starts_later(ours):
    found = compared(ours("a", steps()), ours("b", steps(LOSSES[3:], first=4)))
    assert found.equal and [point.last for point in found.points] == [4, 5, 6]


def test_runs_without_a_step_in_common(ours):
    a = ours("a", steps(LOSSES[:2]))
    never = ours("never", [], status="oom", reason="out of memory")
    for b in (never, ours("later", steps(first=4))):
        found = compared(a, b)
        assert not found.equal and not found.points
        json.dumps(as_json(found))
    assert "out of memory" in as_text(compared(a, never))


@pytest.mark.parametrize("missing", ["results.json", "metrics.jsonl"])
def test_a_missing_file(ours, missing):
    a, b = ours("a", steps()), ours("b", steps())
    (b / missing).unlink()
    found = compared(a, b)
    assert found.equal == (missing == "results.json")
    as_text(found)


def test_damaged_results(ours):
    a, b = ours("a", steps()), ours("b", steps())
    for text in (
        "{",
        "[]",
        '{"flags": 1, "run_signature": {"soft": 3}, "dataset": 4, "versions": []}',
    ):
        (b / "results.json").write_text(text)
        assert compared(a, b).equal
        as_text(compared(a, b))


def test_evaluations_that_differ(ours):
    evaluations = [{"step": 6, "eval_loss": loss} for loss in (5.0, 5.1)]
    a, b = (ours(name, [*steps(), record]) for name, record in zip("ab", evaluations, strict=True))
    found = compared(a, b)
    assert not found.equal and first_of(found) is None
    assert "evaluations differ at step 6" in answer(found)


def test_means_of_trainer(ours, trainers):
    """Losses over 2 and over 3 steps are compared in the means of the steps up to 6."""
    means = [sum(LOSSES[start : start + 2]) / 2 for start in (0, 2, 4)]
    of_two = trainers("two", dict(zip((2, 4, 6), means, strict=True)))
    of_three = trainers("three", {3: 7.5, 6: 6.0003})
    found = compared(ours("a", steps()), of_two / "checkpoint-6" / "trainer_state.json")
    assert found.equal and [(p.first, p.last) for p in found.points] == [(1, 2), (3, 4), (5, 6)]
    found = compared(of_two, of_three)  # their output folders
    assert [(p.first, p.last) for p in found.points] == [(1, 6)]
    assert found.points[0].relative == pytest.approx(5e-5 / 6.75, rel=1e-3)
    assert compared(ours("c", steps([loss + 1e-3 for loss in LOSSES])), of_two).equal is False


def test_places_without_a_run(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "trainer_state.json", tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UserError):
            read_run(place)
