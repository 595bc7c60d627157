"""Comparisons: what is read of runs, and what is said about their difference; the page of a run."""

import json
import re
import sys
import warnings

import pytest
from written_runs import LOSSES, RESULTS, save, steps

from distributed_training.errors import UserError
from distributed_training.records.compare import compare_runs, read_comparison, read_row
from distributed_training.records.loss_figure import draw_losses
from distributed_training.records.recorded_run import read_folder, read_run
from tools.runs import plots
from tools.runs.comparison_text import (
    as_json,
    as_markdown,
    as_text,
    progress_header,
    progress_row,
    tables_of,
)
from tools.runs.page import page_of


def compared(*places, tolerance=1e-6):
    """The comparison as JSON with the keys of the last run, and its text without line breaks."""
    comparison = compare_runs(*places, tolerance=tolerance)
    found = json.loads(json.dumps(as_json(comparison), allow_nan=False))
    return found | found["runs"][-1], as_text(comparison, wide=True).replace("\n   ", " ")


# ------------------------------------------------------------------------------------------ causes


def test_another_learning_rate_with_equal_flags_is_named(ours):
    """A run was resumed after a decay, which a whole run does not have at this step."""
    other = [*LOSSES[:3], *(loss + 0.1 for loss in LOSSES[3:])]
    decayed = steps(other)
    decayed[2]["lr"] = 1e-4
    found, text = compared(ours("a", steps()), ours("b", decayed))
    assert (
        found["likely_causes"] == ["a schedule that no flag explains"] and "learning rate" in text
    )


def test_losses_under_other_tokenizers_are_given_in_bits_per_byte(ours):
    other = [loss + 0.1 for loss in LOSSES]
    a = ours("a", steps(), soft={"tokenizer": "x"}, bits_per_byte=1.25)
    b = ours("b", steps(other), soft={"tokenizer": "y"}, bits_per_byte=1.2)
    found, text = compared(a, b)
    assert "bits per byte: 1.2500 and 1.2000" in text and found["bits_per_byte"] == 1.2
    same = ours("c", steps(other), soft={"tokenizer": "x"}, bits_per_byte=1.2)
    assert "bits per byte:" not in compared(a, same)[1]


def test_equal_runs(ours):
    """The learning rates are equal, so max_steps is no difference."""
    close = [*(loss * (1 + 1e-7) for loss in LOSSES), 5.0, 4.5]
    a = ours("a", steps(), {"seed": "a", "max_steps": 6})
    b = ours("b", steps(close), {"seed": "b", "max_steps": 8})
    found, text = compared(a, b)
    assert found["exit_code"] == 0 and "✅" in text and found["compared_steps"] == 6
    assert found["largest_difference"]["relative"] == pytest.approx(1e-7, rel=0.01)
    assert [entry["name"] for entry in found["differences"]] == ["seed"]
    assert not found["likely_causes"]


def test_code_that_differs_can_change_more_than_rounding(ours):
    """It is no likely cause, but the table must not contradict "more than rounding explains"."""
    other = [loss + 0.1 for loss in LOSSES]
    places = [ours("a", steps(), code_digest="x"), ours("b", steps(other), code_digest="y")]
    found, text = compared(*places)
    assert "more than rounding explains" in text and found["likely_causes"] == []
    assert [line.split()[-3:] for line in text.splitlines() if line.startswith("code_digest")] == [
        ["rounding", "or", "more"]
    ]


def test_tokens_that_differ_for_the_same_text_are_the_cause(ours):
    """As with a chat template that writes the date; earlier versions recorded no such digest."""
    other = [loss + 0.1 for loss in LOSSES]
    days = [{"tokens_sha256": digit * 64} for digit in "bc"]
    places = [ours("a", steps(), soft=days[0]), ours("b", steps(other), soft=days[1])]
    assert compared(*places)[0]["likely_causes"] == ["token digest"]
    assert compared(places[0], ours("c", steps(other)))[0]["likely_causes"] == []


def test_a_learning_rate_that_differs_later_is_the_cause(ours):
    """The seed differs, too; but it would have changed the first step."""
    b = [*steps(LOSSES[:3]), *steps([6.5, 6.1, 5.7], first=4, lr=9e-4)]
    flags = [{"lr_scheduler": "linear", "run_name": "x"}, {"lr_scheduler": "cosine", "seed": 7}]
    found, text = compared(ours("a", steps(), flags[0]), ours("b", b, flags[1]))
    assert found["first_difference"]["last"] == 5 and found["exit_code"] == 1
    assert found["likely_causes"] == ["lr_scheduler", "seed"]
    assert [entry["name"] for entry in found["differences"]] == ["seed", "lr_scheduler"]
    assert "from step 5 (6.0000 and 6.1000" in text


def test_other_data_is_the_cause(ours):
    b = ours("b", steps([9.0, *LOSSES[1:]]), soft={"dataset": "b" * 64})
    found, _ = compared(ours("a", steps()), b)
    assert found["first_difference"]["last"] == 1 and found["likely_causes"] == ["data digest"]


@pytest.mark.parametrize("size, explained", [(5e-5, True), (1e-2, False)])
def test_what_explains_rounding_only(ours, size, explained):
    b = ours("b", steps([*LOSSES[:5], 5.5 * (1 + size)]), strategy="zero2")
    found, text = compared(ours("a", steps()), b)
    assert found["first_difference"]["last"] == 6 and not found["likely_causes"]
    assert ("Likely cause: rounding" in text) == explained
    assert ("more than rounding explains" in text) != explained


def test_evaluations_that_differ(ours):
    evaluations = [{"step": 6, "eval_loss": loss} for loss in (5.0, 5.1)]
    a, b = (ours(name, [*steps(), record]) for name, record in zip("ab", evaluations, strict=True))
    found, text = compared(a, b)
    assert found["exit_code"] == 1 and found["first_difference"]["a"] == 5.0
    assert "evaluations differ from those of A from step 6" in text


NORMS = [12.0, 6.0, 7.0, 6.5, 5.0, 4.0]


def test_gradients_that_differ_although_the_losses_agree(ours):
    """AdamW hides a wrong scale of the gradients from the losses."""
    b = ours("b", steps(norms=[norm / 4 for norm in NORMS]), strategy="zero2")
    found, text = compared(ours("a", steps(norms=NORMS)), b, tolerance=None)
    assert found["exit_code"] == 1 and found["departing"] == ["B"] and not found["same_model"]
    assert found["first_difference"] == {
        **{"of": "grad_norm", "first": 1, "last": 1, "a": 12.0, "b": 3.0, "relative": 0.75}
    }
    assert found["norm_difference"] == found["largest_norm_difference"]["relative"] == 0.75
    assert found["difference"] == 0 and "✅" not in text and "12.0000 and 3.0000" in text


def test_losses_come_first_where_both_differ(ours):
    b = ours("b", steps([8.0, 7.0, *LOSSES[2:]], norms=[9.0, *NORMS[1:]]))
    found, text = compared(ours("a", steps(norms=NORMS)), b)
    assert found["first_difference"]["of"] == "loss" and found["first_difference"]["last"] == 2
    assert "gradient norms differ from step 1" in text


def test_gradient_norms_that_cannot_be_compared(ours):
    """Of an earlier version, and of a step in fp16 that overflowed."""
    a = ours("a", steps(norms=NORMS))
    for name, norms in {"old": [], "null": [None] * 6, "over": [-1, *NORMS[1:]]}.items():
        found, text = compared(a, ours(name, steps(norms=norms)), tolerance=None)
        assert found["same_model"] and found["exit_code"] == 0
        assert ("gradient norms" in text) == (name == "over") and "nan" not in text.lower()


@pytest.mark.parametrize(
    "precision, difference, same",
    [("fp32", 1.2e-6, True), ("fp32", 2e-4, False), ("bf16", 2e-3, True), ("bf16", 2e-2, False)],
)
def test_by_default_rounding_of_the_precision_is_no_difference(ours, precision, difference, same):
    b = steps([loss * (1 + difference) for loss in LOSSES])
    runs = [
        ours(name, records, precision=precision) for name, records in (("a", steps()), ("b", b))
    ]
    found, text = compared(*runs, tolerance=None)
    assert found["same_model"] == same and found["exit_code"] == (not same)
    assert ("Likely cause: rounding" not in text) or not same
    assert not compared(*runs, tolerance=0)[0]["same_model"]  # each step, bit for bit


def test_the_lower_precision_of_two_decides(ours):
    a, other = ours("a", steps()), steps([loss * 1.002 for loss in LOSSES])
    found, _ = compared(a, ours("b", other), ours("c", other, precision="bf16"), tolerance=None)
    assert found["departing"] == ["B"] and found["tolerance"] == 5e-3


def test_the_figure_of_equal_runs_and_of_losses_that_are_not_finite(ours, tmp_path):
    """Neither has a logarithm."""
    a = ours("a", steps([8.0, None, 7.0], norms=NORMS))
    for name, losses in {"b": [8.0, None, 7.0], "c": [8.0, 7.5, None]}.items():
        other = ours(name, steps(losses, norms=NORMS))
        for tolerance in (0, None):
            comparison = compare_runs(a, other, tolerance=tolerance)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plots.draw(comparison, tmp_path / "figure.png")
            kinds = [warning.category for warning in caught]
            assert not [kind for kind in kinds if not issubclass(kind, DeprecationWarning)]


# ------------------------------------------------------------------------------------------- files


def test_a_line_that_cannot_be_read_is_named(ours):
    """By the comparison, and on the page of the run; not the last line of a run that was killed."""
    a, b = ours("a", steps()), ours("b", steps())
    lines = (b / "metrics.jsonl").read_text().splitlines()
    lines[2] = lines[2][:20]
    (b / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 7, "lo')
    found, text = compared(a, b)
    assert found["same_model"] and found["compared_steps"] == 5 and "in 5 steps" in text
    assert f"{b}/metrics.jsonl: line 3 " in text and found["unreadable_lines"] == [3]
    page, notices, *_ = page_of(b)
    assert len(notices) == 1 and "line 3 " in notices[0] and "line 3 " in page
    assert compared(a, a)[0]["unreadable_lines"] == []


def test_without_matplotlib_there_are_no_pictures(ours, monkeypatch, capsys):
    folder = ours("a", steps())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page, notices, *_ = page_of(folder)
    assert "<svg" not in page and "5.5" in page and "has no step" not in page
    assert len(notices) == 1 and "pip install matplotlib" in notices[0]
    for _ in range(2):  # after an evaluation, and at the end
        draw_losses(folder / "metrics.jsonl")
    out, err = capsys.readouterr()
    assert (out + err).count("pip install matplotlib") == 1


def test_a_loss_that_is_not_finite_is_equal_only_to_itself(ours):
    a = ours("a", steps([8.0, None, None]))
    assert compared(a, ours("b", steps([8.0, None, None])))[0]["same_model"]
    found, _ = compared(a, ours("c", steps([8.0, None, 7.0])))
    assert found["first_difference"]["last"] == 3


def test_runs_without_a_step_in_common(ours):
    never = ours("never", [], status="oom", reason="out of memory")
    found, text = compared(ours("a", steps(LOSSES[:2])), ours("later", steps(first=4)), never)
    assert found["exit_code"] == 1 and not found["compared_steps"]
    assert text.count("no step in common") == 2 and "out of memory" in text


def test_damaged_or_missing_results(ours):
    a, b = ours("a", steps()), ours("b", steps())
    with open(b / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 5.')
    (b / "results.json").write_text("{")
    assert compared(a, b)[0]["same_model"]
    (b / "results.json").unlink()
    assert compared(a, b)[0]["same_model"]


def test_means_of_trainer_are_compared_with_the_means_of_the_same_steps(ours, tmp_path):
    means = [sum(LOSSES[start : start + 2]) / 2 for start in (0, 2, 4)]
    history = [{"step": 2 * number, "loss": loss} for number, loss in enumerate(means, 1)]
    file = tmp_path / "two" / "checkpoint-6" / "trainer_state.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"log_history": [*history, {"step": 6, "train_loss": 7.0}]}))
    a = ours("a", steps())
    comparison = compare_runs(a, file)
    assert comparison.same_model
    spans = [(point.first, point.last) for point in comparison.runs[1].agreement.points]
    assert spans == [(1, 2), (3, 4), (5, 6)]
    found, text = compared(a, tmp_path / "two", ours("c", steps([loss + 1e-3 for loss in LOSSES])))
    assert found["departing"] == ["C"] and "B agree" in text  # three at once


# -------------------------------------------------------------------------------------- strategies


@pytest.fixture
def strategies(tmp_path):
    """strategies(losses, dp=[{…}], zero2=[{…}]) saves repeats with changes of RESULTS, and
    compares them.
    """

    def make(losses=LOSSES, **repeats):
        for name, changes in repeats.items():
            strategy = {"strategy": "dp" if name == "control" else name}
            for number, change in enumerate(changes, 1):
                own = change.pop("losses", losses)
                save(tmp_path / name / str(number), RESULTS | strategy | change, steps(own))
        comparison = read_comparison(tmp_path)
        json.dumps(as_json(comparison), allow_nan=False)
        return comparison, as_text(comparison).replace("\n   ", " ")

    return make


def at(speed, low=None, high=None):
    """Results of a run whose median step has this speed (of RESULTS: 2), in sequences per second;
    `low` and `high` are the speeds of the 90th and the 10th percentile.
    """
    times = {"median": speed, "p90": low or speed, "p10": high or speed}
    return {"step_seconds": {key: RESULTS["global_batch_size"] / s for key, s in times.items()}}


# What a single rank does not measure.
UNKNOWN = {
    **dict.fromkeys(["communication_bytes_per_step", "communication_per_step"]),
    "memory": RESULTS["memory"] | {"predicted_bytes": None},
}


@pytest.mark.parametrize("change", [{}, UNKNOWN], ids=["plain", "without some numbers"])
def test_a_comparison_of_strategies(strategies, change):
    comparison, text = strategies(dp=[dict(change)], zero2=[dict(change)])
    assert comparison.same_model and comparison.exit_code == 0 and "Fastest: dp" in text
    assert all(len(line) <= 80 for line in as_text(comparison).splitlines())
    assert "times first" in as_markdown(comparison)  # headers have several lines in the text only
    assert len(tables_of(comparison, True)[0][1]) > len(tables_of(comparison, False)[0][1])


def test_a_simulation_is_reported(strategies):
    gone = "samples_per_second step_seconds step_phases_seconds train_loss_last"
    change = {"simulated_world_size": 4} | dict.fromkeys(gone.split())
    comparison, text = strategies([], dp=[dict(change)], zero2=[dict(change)])
    assert comparison.simulated and comparison.exit_code == 0 and "memory simulation" in text


@pytest.mark.parametrize(
    "change, status, reason",
    [
        ({"losses": []}, "failed", "no step"),
        ({"memory": {}}, "failed", "lacks a number"),
        ({"status": "oom", "reason": "full"}, "oom", "full"),
        ({"error_kind": "missing_requirement", "status": "failed"}, "skipped", ""),
    ],
)
def test_a_run_that_cannot_be_compared_is_left_out(strategies, change, status, reason):
    comparison, text = strategies(dp=[{}], zero2=[dict(change)], fsdp=[{}])
    assert [run.status for run in comparison.runs] == ["completed", status, "completed"]
    assert comparison.exit_code == (status != "skipped") and reason in text


@pytest.mark.parametrize("speed, comparable", [(1.6, True), (1.4, False), (4, False)])
def test_speeds_under_different_load_are_not_ranked(strategies, speed, comparable):
    """The control does the same work as dp. What slows down a few of its steps does not count."""
    control = [at(speed, low=0.9 * speed) | {"samples_per_second": 0.9 * speed}]
    comparison, text = strategies(dp=[{}], zero2=[{}], control=control)
    assert comparison.speeds_are_comparable == comparable
    assert ("Fastest" in text) == comparable and ("not comparable" in text) != comparable


@pytest.mark.parametrize("factor, seen", [(1.00001, False), (1.1, True), (None, None)])
def test_same_model_is_claimed_only_if_the_control_would_have_differed(strategies, factor, seen):
    control = [] if factor is None else [{"losses": [loss * factor for loss in LOSSES]}]
    comparison, text = strategies(dp=[{}], zero2=[{}], control=control)
    assert comparison.same_model and comparison.exit_code == 0
    assert (comparison.conclusive, as_json(comparison)["conclusive"]) == (seen, seen)
    assert ("✅ Same model" in text) == (seen is True) and ("✅" in text) == (seen is not False)


def test_strategies_are_ranked_only_beyond_the_change_of_the_machine(strategies):
    """dp and its control differ by 20 percent, so zero2 is as fast as dp, and zero3 is not."""
    names = {"dp": 2.0, "zero2": 1.7, "zero3": 1.6, "control": 2.4}
    text = strategies(**{name: [at(speed)] for name, speed in names.items()})[1]
    assert "Fastest: dp, zero2. " in text and "1.20 times" in text


def test_repeats_give_the_median_and_the_spread(strategies):
    comparison, _ = strategies(dp=[at(1.0)], zero1=[at(speed) for speed in (1.0, 2.0, 1.5)])
    numbers = comparison.runs[1].numbers
    assert [numbers[f"samples_per_second{end}"] for end in ("", "_low", "_high")] == [1.5, 1.0, 2.0]
    assert numbers["speed"] == 1.5


def test_repeats_of_the_reference_that_differ(strategies):
    """No strategy is left that could be recommended."""
    comparison, text = strategies(dp=[{}, {"losses": [8.0, 7.0, 6.5, 6.0, 5.5, 5.0]}])
    assert comparison.exit_code == 1 and comparison.departing == [comparison.reference]
    assert "another repeat" in text and "Fastest" not in text


def test_a_repeat_that_fails_shows_and_the_others_count(strategies, tmp_path):
    """Also without results.json: its log has the reason."""
    (tmp_path / "zero1" / "3").mkdir(parents=True)
    log = "starting\n❌ its own reason [rank 1]\n❌ a rank ended\nlast line\n"
    (tmp_path / "zero1" / "3" / "log.txt").write_text(log)
    comparison, text = strategies(dp=[{}], zero1=[{}, {}])
    run = comparison.runs[1]
    assert comparison.exit_code == 1 and run.status == "failed" and run.numbers
    assert "its own reason" in text and "a rank ended" not in text


@pytest.mark.parametrize(
    "log",
    [
        "  exitcode  : -9 (pid: 27824)",  # torchrun
        # deepspeed 0.19.8, whose own exit status is 247
        "[launch.py:259:sigkill_handler] ['python', '-u', 'x.py'] exits with return code = -9",
    ],
)
def test_a_killed_rank_ran_out_of_memory_under_each_launcher(tmp_path, log):
    (tmp_path / "log.txt").write_text(f"starting\n{log}\n")
    (tmp_path / "outcome.txt").write_text("exit 247\n12\n")
    run = read_folder(tmp_path)
    assert (run.status, run.seconds) == ("oom", 12) and "SIGKILL" in run.reason


@pytest.mark.parametrize("moved, same", [([2], True), ([5, 6], True), (range(3, 13), False)])
def test_in_bf16_a_difference_counts_that_lasts(strategies, moved, same):
    losses = [8 - 0.1 * number for number in range(12)]
    others = [loss * (1.02 if n in moved else 1) for n, loss in enumerate(losses, 1)]
    bf16 = {"precision": "bf16", "steps": 12}
    comparison, _ = strategies(losses, dp=[dict(bf16)], zero1=[bf16 | {"losses": others}])
    assert (comparison.same_model, comparison.exit_code) == (same, 0 if same else 1)


def test_numbers_of_a_gpu(strategies):
    peaks = {"dp": 8, "zero2": 5, "offload": 3}
    memory = {name: [2**30, peak * 2**30] for name, peak in peaks.items()}
    gpu = {"device": "cuda", "hardware": RESULTS["hardware"] | {"gpu": "G"}, "precision": "bf16"}
    comparison, text = strategies(
        **{
            name: [gpu | {"memory": RESULTS["memory"] | {"peak_bytes": peak}}]
            for name, peak in memory.items()
        }
    )
    assert [run.numbers["memory_bytes"] >> 30 for run in comparison.runs] == [8, 5, 3]
    assert comparison.runs[1].numbers["saved"] == 1 - 5 / 8
    assert "Least GPU memory: offload" in text


@pytest.mark.parametrize("facts, tolerance", [({}, 1e-3), ({"tf32": False}, 1e-4)])
def test_fp32_on_a_gpu_is_tf32_unless_it_was_disabled(strategies, facts, tolerance):
    gpu = {"device": "cuda", "hardware": RESULTS["hardware"] | {"gpu": "G"}, **facts}
    comparison, text = strategies(dp=[dict(gpu)], zero2=[dict(gpu)])
    assert comparison.tolerance == tolerance and ("fp32 with TF32" in text) == (not facts)


# ----------------------------------------------------------------- rows of a comparison in progress


@pytest.fixture
def progress(tmp_path):
    """progress(name, change, planned) saves a run that has ended, and returns the header and the
    row that is printed then, as lists of words.
    """

    def make(name, change=None, planned="dp zero2 fsdp control cpu"):
        (tmp_path / "planned.txt").write_text(planned)
        change = change or {}
        losses = change.pop("losses", LOSSES)
        results = RESULTS | {"strategy": "dp" if name == "control" else name} | change
        place = save(tmp_path / name / "1", results, steps(losses))
        (place / "outcome.txt").write_text("exit 0\n17\n")
        row = progress_row(read_row(place), planned.split())
        header = progress_header(planned.split())
        ruler = [len(column) for column in header.splitlines()[-1].split()]
        starts = [sum(ruler[:n]) + n for n in range(len(ruler))]
        line, *reason = row.splitlines()
        cells = [line[start : start + width] for start, width in zip(starts, ruler, strict=True)]
        headers = [
            " ".join(part[start : start + width].strip() for part in header.splitlines()[:-1])
            for start, width in zip(starts, ruler, strict=True)
        ]
        assert line == " ".join(cells).rstrip()  # nothing is wider than its column
        assert all(len(part) <= 80 for part in [*header.splitlines(), line, *reason])
        names = [" ".join(name.split()) for name in headers]
        return dict(zip(names, map(str.strip, cells), strict=True)), " ".join(reason)

    return make


def test_a_row_has_the_columns_of_the_final_table(progress, tmp_path):
    row, _ = progress("dp")
    final = tables_of(read_comparison(tmp_path), wide=False)[0][1]
    assert [*row] == [*(" ".join(header.split()) for header in final), "time"]
    assert row["times first"] == "1.00" and row["loss diff."] == "0.0e+00" and row["time"] == "17 s"
    row, _ = progress("zero2", at(1.0) | {"losses": [8.0, 7.5, 7.0, 6.5, 6.0, 5.5055]})
    assert row["times first"] == "0.50" and row["loss diff."] == "1.0e-03"
    assert (row["samples /s"], row["final loss"]) == ("1.0", "5.5000")
    row, _ = progress("control", at(2.2) | {"losses": [8.0, 7.5, 7.0, 6.5, 6.0, 5.61]})
    assert row["times first"] == "1.10" and row["loss diff."] == "2.0e-02"


def test_a_row_before_the_reference_has_no_ratios(progress):
    """offload waited for the compilation of its op, and dp was left out."""
    row, _ = progress("fsdp", planned="offload fsdp cpu")
    assert row["samples /s"] == "2.0"
    assert [row[key] for key in ("times first", "±", "loss diff.")] == ["—"] * 3
    failed, reason = progress("offload", {"status": "oom", "reason": "too big"}, "offload fsdp cpu")
    assert (failed["status"], failed["samples /s"], reason.strip()) == ("oom", "—", "too big")
    row, _ = progress("fsdp", planned="offload fsdp cpu")
    assert row["times first"] == "1.00"  # the first strategy that completed


def test_rows_of_a_simulation_and_of_a_gpu(progress):
    row, _ = progress("dp", planned="dp zero2 cpu simulated")
    assert [*row] == ["", "status", "state MB", "plan", "time"]
    row, _ = progress("dp", {"device": "cuda"}, planned="dp zero2 cuda")
    assert "GPU peak GB" in row and "state MB" not in row


# ------------------------------------------------------------------------------- scripts/report.py

HOSTILE = "</title></pre><script>alert(1)</script><img src=//x.y onerror=alert(2)>'\"$\\q$"
CONTROLS = "\x1b\x9b\u202e\u200b"
SECRET = " https://me:the-canary-of-my-key@host/ the-canary-of-my-key"
SHOWN = RESULTS | {"sample": "once", "reason": "why", "train_loss_first": 8.0, "flags": {"a": "n"}}


def with_text(value, text):
    """A JSON value with `text` after every text."""
    if isinstance(value, dict):
        return {key: with_text(item, text) for key, item in value.items()}
    if isinstance(value, list):
        return [with_text(item, text) for item in value]
    return value + text if isinstance(value, str) else value


def test_text_of_files_is_shown_escaped_and_without_secrets(tmp_path, monkeypatch):
    """It never becomes a script or a request of the page."""
    monkeypatch.setenv("MY_KEY", "the-canary-of-my-key")
    records = [*steps(), {"step": 6, "eval_loss": 7.1}]
    folder = tmp_path / "<script>alert(3)<"
    page, *_ = page_of(save(folder, with_text(SHOWN, HOSTILE + SECRET + CONTROLS), records))
    shown = ("Memory", "time of a step", "Communication", "Generated text", "all_reduce float32")
    assert all(word in page for word in (*shown, "once", "python x", "8.0000", "5.5000"))
    assert page.count("<svg") == 4
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 10
    assert not re.search("<(script|img|link|iframe|object|a|base|form)[ >]", page)
    assert "canary" not in page and "***" in page
    assert not {*CONTROLS} & {*page} and "\\u202e" in page


def test_the_page_has_all_generated_texts(tmp_path):
    """After its prompt, unless it begins with it; an earlier version has one text only."""
    texts = [{"prompt": "Once", "text": "Once upon"}, {"prompt": "Why?", "text": "Because."}]
    page, *_ = page_of(save(tmp_path / "a", SHOWN | {"generated": texts}, steps()))
    assert "<pre>Once upon\n\nWhy?\nBecause.</pre>" in page
    assert "<pre>once</pre>" in page_of(save(tmp_path / "b", SHOWN, steps()))[0]


def test_a_page_is_named_after_model_and_strategy(tmp_path):
    """Not after the folder, which is the number of the repeat for a run of a comparison."""
    folder = tmp_path / "tiny-gpt2" / "zero2" / "1"
    results = SHOWN | {"model": "gpt2", "strategy": "zero2", "world_size": 2}
    page, *_ = page_of(save(folder, results, steps()))
    assert "<title>gpt2 under zero2, 2 ranks</title>" in page and str(folder) in page
    page, *_ = page_of(save(folder, {"status": "failed"}, []))
    assert "<title>1</title>" in page  # it failed before it knew them


def test_missing_and_truncated_files(tmp_path):
    results, metrics = (
        save(tmp_path, SHOWN, steps()) / f for f in ("results.json", "metrics.jsonl")
    )
    results.write_text(results.read_text()[:20])
    metrics.unlink()
    page, *_ = page_of(tmp_path)
    assert "results.json" in page and "metrics.jsonl" in page


def test_the_page_of_a_run_that_failed_says_why(tmp_path):
    page, *_ = page_of(save(tmp_path, {"status": "oom", "reason": "no memory left"}, []))
    assert "no memory left" in page and "metrics.jsonl has no step" in page


@pytest.mark.parametrize(
    "change",
    [
        {"steps": "many"},
        {"flags": [1]},
        {"generated": [{"prompt": "a"}]},
        {"communication_per_step": {"all_reduce float32": 7}},
        {"step_phases_seconds": {"forward": "x"}},
        {"memory": {"categories_bytes_by_rank": [7]}},
        {"run_signature": {"soft": [1]}},
        {"status": 7},
    ],
)
def test_results_of_another_type_are_refused(tmp_path, change):
    folder = save(tmp_path, SHOWN | change, steps())
    for read in (page_of, read_run):
        with pytest.raises(UserError, match=f"results.json.* {next(iter(change))}"):
            read(folder)
