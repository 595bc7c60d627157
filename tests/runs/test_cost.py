"""What plan_memory.py computes from the results of a run."""

import json

import pytest
from memory_checks import plan, planned

PLAN = "--model tiny-gpt2 --gpu_memory 8 --seq_length 32 --batch_size 2".split()


@pytest.fixture(scope="module")
def run(script):
    work = "--seq_length 32 --batch_size 2 --max_steps 8 --save_every 4 --precision bf16"
    return script(*work.split(), "--no_eval", "--no_export")


def test_hours_are_tokens_divided_by_the_measured_rate(run):
    args = [*PLAN, "--tokens", 6420, "--epochs", 3, "--price", 2, "--watts", 500]
    found = planned(*args, "--results", run.folder)["cost"]
    tokens = 3 * 200 * 32  # in sequences of 32 tokens, 200 in an epoch
    hours = tokens / run.results["tokens_per_second"] / 3600
    assert found["tokens"] == tokens and found["steps"] == 3 * 100
    assert found["hours"] == found["gpu_hours"] == pytest.approx(hours)
    assert found["price"] == pytest.approx(2 * hours)
    assert found["energy_kwh"] == pytest.approx(0.5 * hours)
    assert found["sources"]["tokens_per_second_per_gpu"].startswith("measured")
    assert not found["warning"]  # the plan is the run's own work
    code, _ = plan(*args, "--results", run.folder / "results.json")
    assert code == 0


def test_a_rate_is_not_carried_over_silently(run):
    """To four GPUs and another strategy; with a network, the time of sending is added."""
    args = [*PLAN, "--gpus", 4, "--tokens", 10**6, "--results", run.folder, "--gpu_memory", "1.14"]
    found = planned(*args)
    changed = ["strategy (dp", "world_size (1, planned: 4)", "--bandwidth"]
    assert found["recommended"] != "dp"
    assert all(words in found["cost"]["warning"] for words in changed)
    rate = run.results["tokens_per_second_per_gpu"]
    assert found["cost"]["gpu_hours"] == pytest.approx(10**6 / rate / 3600, rel=1e-4)
    assert found["cost"]["hours"] == pytest.approx(10**6 / rate / 3600 / 4, rel=1e-4)
    slower = planned(*args, "--bandwidth", 0.01)["cost"]
    assert "world_size" not in slower["warning"]
    assert slower["hours"] > found["cost"]["hours"]


@pytest.mark.slow
def test_the_rate_is_measured_with_the_planned_work(tmp_path):
    code, out = plan(*PLAN, "--max_steps", 100, "--measure", "--json")
    found = json.JSONDecoder().raw_decode(out)[0]["cost"]  # stderr follows
    assert code == 0 and found["tokens"] == 100 * 2 * 32
    rate = found["tokens_per_second_per_gpu"]
    assert rate > 0 and found["hours"] == pytest.approx(6400 / rate / 3600)
    config = '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}'
    (tmp_path / "config.json").write_text(config)  # without a tokenizer
    code, out = plan(*PLAN[2:], "--model", tmp_path, "--tokens", 100, "--measure")
    assert code == 1 and "tokenizer" in out.splitlines()[-1] and out.count("❌") == 1


def test_slurm_jobs_and_saves_follow_from_a_run(run):
    flags = ["--max_steps", 10**6, "--results", run.folder, "--time_limit", "00:10:00"]
    found = planned(*PLAN, *flags, "--mtbf", 2)["cost"]
    step, save = 3600 * found["hours"] / 10**6, max(run.results["checkpoint_seconds"])
    every = (2 * save * 2 * 3600) ** 0.5 / step
    assert found["save_every"] == pytest.approx(every, abs=1)
    usable = 600 - found["signal_seconds"] - run.results["seconds_to_first_step"]
    jobs = 10**6 * step / (usable / (1 + save / (every * step)))
    assert found["jobs"] == pytest.approx(jobs, rel=0.02) and found["signal_seconds"] == 120
    # Without a run the time of a save must be given; the signal comes twice that time before the end.
    args = [*PLAN, *flags[:2], "--device", "A100", "--time_limit", "10:00:00"]
    assert planned(*args, "--save_seconds", 600)["cost"]["signal_seconds"] == 1260
    code, out = plan(*args)
    assert code == 2 and "--save_seconds" in out.splitlines()[-1]


@pytest.mark.parametrize(
    "changes, flags, says",
    [
        ({}, [], "line"),  # a file that was cut off
        ({"status": "failed", "reason": "x"}, [], "failed"),
        ({"tokens_per_second_per_gpu": None}, [], "trained"),
        ({"parameters": 5}, [], "parameters (5, planned"),
        ({"world_size": 2}, ["--bandwidth", 1], "world"),
    ],
)
def test_results_that_have_no_rate_for_the_plan(run, tmp_path, main_of, changes, flags, says):
    text = json.dumps(run.results | changes)
    (tmp_path / "results.json").write_text(text if changes else text[:300])
    done = main_of("plan_memory", *PLAN, "--tokens", 9, "--results", tmp_path, *flags)
    assert done.code == 2 and says in done.error
