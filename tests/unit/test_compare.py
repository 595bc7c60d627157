"""Comparisons: what is read of runs, and what is said about their difference."""

import json
import sys

import pytest

from support.errors import UserError
from support.report.causes import EFFECT_OF
from support.report.compare import compare_runs, last_error, read_comparison, read_run
from support.report.comparison_text import as_json, as_markdown, as_text, tables_of

LOSSES = [8.0, 7.5, 7.0, 6.5, 6.0, 5.5]
STATES = {"parameters": 8 << 20, "gradients": 8 << 20, "optimizer": 16 << 20}
RANK = {**STATES, "buffers": 0, "other": 1}
RESULTS = {
    **{"status": "completed", "strategy": "dp", "model": "tiny-gpt2", "parameters": 2 << 20},
    **{"trainable_parameters": 2, "world_size": 2, "simulated_world_size": None, "device": "cpu"},
    **{"precision": "fp32", "batch_size": 1, "gradient_accumulation_steps": 1, "seed": 1},
    **{"global_batch_size": 2, "seq_length": 8, "steps": 6, "samples": 12, "command": "python x"},
    **{"dataset": {"name": "d", "sha256": "x"}, "started_at": "2026-01-01T00:00:00+00:00"},
    "hardware": {"cpu": "c", "cores": 1, "gpu": None, "gpu_memory_bytes": None, "ram_bytes": 9},
    "versions": {"torch": "2", "deepspeed": "1", "transformers": "5"},
    "memory": {
        **{"peak_bytes": [9, 9], "host_peak_bytes": [9, 9], "nvme_bytes": 0},
        "categories_bytes_by_rank": [RANK, RANK],
        "device_categories_bytes_by_rank": [RANK, RANK],
        "predicted_bytes": {**STATES, "peak": 40 << 20},
    },
    **{"samples_per_second": 2.0, "tokens_per_second_per_gpu": 16.0, "train_loss_last": 5.5},
    "step_seconds": {"median": 1.0, "p10": 0.9, "p90": 1.2},
    "step_phases_seconds": {"data": 0.1, "forward": 0.1, "backward": 0.1, "update": 0.1},
    "communication_bytes_per_step": 8.0,
    "communication_per_step": {
        "all_reduce float32": {"calls": 1, "message_bytes": 8 << 20, "sent_bytes": 8}
    },
}


def steps(losses=LOSSES, first=1, lr=1e-3):
    return [
        {"step": number, "epoch": 1, "loss": loss, "lr": lr}
        for number, loss in enumerate(losses, first)
    ]


def save(folder, results, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture
def ours(tmp_path):
    """ours(name, records, **results) writes an output folder; `flags` and `soft` have defaults."""

    def write(name, records, flags=None, soft=None, **results):
        signature = {"hard": {"parameters": 10}, "soft": {"dataset": "a" * 64} | (soft or {})}
        facts = {"flags": flags or {"eval": True}, "run_signature": signature}
        return save(tmp_path / name, RESULTS | facts | results, records)

    return write


@pytest.fixture
def trainers(tmp_path):
    """trainers(name, losses by step) writes the trainer_state.json of a checkpoint."""

    def write(name, losses):
        folder = tmp_path / name / "checkpoint-6"
        folder.mkdir(parents=True)
        history = [{"step": end, "loss": loss, "epoch": 0.1} for end, loss in losses.items()]
        history.append({"step": 6, "train_loss": 7.0, "train_runtime": 1.0})
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
        return tmp_path / name

    return write


def compared(*places, tolerance=1e-6):
    """The comparison as JSON with the keys of the last run, and its text without line breaks."""
    comparison = compare_runs([read_run(place) for place in places], tolerance)
    found = json.loads(json.dumps(as_json(comparison), allow_nan=False))
    return found | found["runs"][-1], as_text(comparison, wide=True).replace("\n   ", " ")


# ------------------------------------------------------------------------------------------ causes

# Flags that change no loss, or only the data, whose digest is compared.
NO_EFFECT = """
    dataset dataset_config dataset_revision train_split include text_column prompt_column
    completion_column max_bad_rows cache_dir merge_lora nvme_path auto_micro_batch
""".split()


def test_every_flag_that_can_change_a_loss_is_compared():
    from support.cli.flags import GROUPS

    groups = ("Model", "Data", "Training", "Strategy")
    flags = {name for group in groups for name in GROUPS[group]}
    assert flags - {*NO_EFFECT} <= EFFECT_OF.keys()


def test_equal_runs(ours):
    a = ours("a", steps(), {"seed": "a"})
    b = ours("b", steps([loss * (1 + 1e-7) for loss in LOSSES]), {"seed": "b"})
    found, text = compared(a, b)
    assert found["exit_code"] == 0 and "✅" in text and found["compared_steps"] == 6
    assert found["largest_difference"]["relative"] == pytest.approx(1e-7, rel=0.01)
    assert found["differences"] and not found["likely_causes"]


def test_a_learning_rate_that_differs_later_is_the_cause(ours):
    """The seed differs, too; but it would have changed the first step."""
    b = [*steps(LOSSES[:3]), *steps([6.5, 6.1, 5.7], first=4, lr=9e-4)]
    flags = [{"lr_scheduler": "linear", "run_name": "x"}, {"lr_scheduler": "cosine", "seed": 7}]
    found, text = compared(ours("a", steps(), flags[0]), ours("b", b, flags[1]))
    assert found["first_difference"]["last"] == 5 and found["exit_code"] == 1
    assert found["likely_causes"] == ["lr_scheduler", "seed"]
    assert [entry["name"] for entry in found["differences"]] == ["seed", "lr_scheduler"]
    assert "from step 5 (6.0000 and 6.1000" in text


def test_equal_learning_rates_are_no_cause(ours):
    b = ours("b", steps([*LOSSES, 5.0, 4.5]), {"max_steps": 8})
    found, _ = compared(ours("a", steps(), {"max_steps": 6}), b)
    assert found["same_model"] and found["differences"] == []


def test_other_data_is_the_cause(ours):
    b = ours("b", steps([9.0, *LOSSES[1:]]), soft={"dataset": "b" * 64})
    found, text = compared(ours("a", steps()), b)
    assert found["first_difference"]["last"] == 1 and found["likely_causes"] == ["data digest"]
    assert "Likely cause: data digest" in text


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


# ------------------------------------------------------------------------------------------- files


def test_a_loss_that_is_not_finite_is_equal_only_to_itself(ours):
    a = ours("a", steps([8.0, None, None]))
    assert compared(a, ours("b", steps([8.0, None, None])))[0]["same_model"]
    found, _ = compared(a, ours("c", steps([8.0, None, 7.0])))
    assert found["first_difference"]["last"] == 3


def test_runs_without_a_step_in_common(ours):
    a = ours("a", steps(LOSSES[:2]))
    never = ours("never", [], status="oom", reason="out of memory")
    for b in (never, ours("later", steps(first=4))):
        found, text = compared(a, b)
        assert found["exit_code"] == 1 and not found["compared_steps"]
        assert "no step in common" in text
    assert "out of memory" in compared(a, never)[1]


def test_damaged_or_missing_results(ours):
    a, b = ours("a", steps()), ours("b", steps())
    with open(b / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "loss": 5.')
    (b / "results.json").write_text("{")
    assert compared(a, b)[0]["same_model"]
    (b / "results.json").unlink()
    assert compared(a, b)[0]["same_model"]


def test_means_of_trainer_are_compared_with_the_means_of_the_same_steps(ours, trainers):
    means = [sum(LOSSES[start : start + 2]) / 2 for start in (0, 2, 4)]
    folder = trainers("two", dict(zip((2, 4, 6), means, strict=True)))
    a, file = ours("a", steps()), folder / "checkpoint-6" / "trainer_state.json"
    comparison = compare_runs([read_run(a), read_run(file)], None)
    assert comparison.same_model
    spans = [(point.first, point.last) for point in comparison.runs[1].points]
    assert spans == [(1, 2), (3, 4), (5, 6)]
    found, text = compared(a, folder, ours("c", steps([loss + 1e-3 for loss in LOSSES])))
    assert found["departing"] == ["C"] and "B agree" in text  # three at once


def test_places_without_a_run(tmp_path):
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    for place in (tmp_path / "trainer_state.json", tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError):
            read_run(place)


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
        as_markdown(comparison)
        json.dumps(as_json(comparison), allow_nan=False)
        return comparison, as_text(comparison).replace("\n   ", " ")

    return make


GPU = {"device": "cuda", "hardware": RESULTS["hardware"] | {"gpu": "G", "gpu_memory_bytes": 99}}


CHANGES = {
    "plain": {},
    "one rank": {"communication_bytes_per_step": None, "communication_per_step": None},
    "gpu": GPU,
    "no plan": {"memory": RESULTS["memory"] | {"predicted_bytes": None}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_comparison_of_strategies(strategies, change):
    comparison, text = strategies(dp=[dict(change)], zero2=[dict(change)])
    assert comparison.same_model and comparison.exit_code == 0 and "Fastest: dp" in text
    assert all(len(line) <= 80 for line in as_text(comparison).splitlines())
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


@pytest.mark.parametrize("speed, comparable", [(1.75, True), (1.6, False), (4, False)])
def test_speeds_under_different_load_are_not_ranked(strategies, speed, comparable):
    """The control does the same work as dp."""
    comparison, text = strategies(dp=[{}], zero2=[{}], control=[{"samples_per_second": speed}])
    assert comparison.speeds_are_comparable == comparable
    assert ("Fastest" in text) == comparable and ("not comparable" in text) != comparable


def test_repeats_give_the_median_and_the_spread(strategies):
    repeats = [{"samples_per_second": speed} for speed in (1.0, 2.0, 1.5)]
    comparison, _ = strategies(dp=[{"samples_per_second": 1.0}], zero1=repeats)
    numbers = comparison.runs[1].numbers
    assert [numbers[f"samples_per_second{end}"] for end in ("", "_low", "_high")] == [1.5, 1.0, 2.0]
    assert numbers["speed"] == 1.5


def test_repeats_of_the_reference_that_differ(strategies):
    """No strategy is left that could be recommended."""
    comparison, text = strategies(dp=[{}, {"losses": [8.0, 7.0, 6.5, 6.0, 5.5, 5.0]}])
    assert comparison.exit_code == 1 and comparison.departing == [comparison.reference]
    assert "another repeat" in text and "Fastest" not in text


def test_a_repeat_that_fails_shows_and_the_others_count(strategies, tmp_path):
    """Also without results.json."""
    (tmp_path / "zero1" / "3").mkdir(parents=True)
    (tmp_path / "zero1" / "3" / "log.txt").write_text("❌ its own reason")
    comparison, text = strategies(dp=[{}], zero1=[{}, {}])
    run = comparison.runs[1]
    assert comparison.exit_code == 1 and run.status == "failed" and run.numbers
    assert "its own reason" in text


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
    runs = {
        name: [GPU | {"memory": RESULTS["memory"] | {"peak_bytes": peak}, "precision": "bf16"}]
        for name, peak in memory.items()
    }
    comparison, text = strategies(**runs)
    assert [run.numbers["memory_bytes"] >> 30 for run in comparison.runs] == [8, 5, 3]
    assert comparison.runs[1].numbers["saved"] == 1 - 5 / 8
    assert "Least GPU memory: offload" in text


def test_without_matplotlib_the_text_is_printed(ours, monkeypatch, capsys):
    import compare_runs as script

    places = [str(ours(name, steps())) for name in "ab"]
    monkeypatch.delitem(sys.modules, "support.report.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *places])
    assert script.main() == 0
    out, err = capsys.readouterr()
    assert "✅ Same model" in out and "matplotlib" in err and len(err.splitlines()) == 1


def test_error_of_a_log():
    log = "starting\n❌ the disk is full [rank 1]\n❌ a rank ended\nlast line\n---"
    assert last_error(log) == "the disk is full [rank 1]"
    assert last_error("a\nb\n--\n") == "b" and last_error("") == ""
