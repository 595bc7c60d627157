"""What plan_memory.py and distributed_setup.py compute from the results of a run."""

import json
import shutil

import pytest
from attacks import Attack, table
from cluster_work import setup
from memory_checks import plan, planned

PLAN = "--model tiny-gpt2 --gpu_memory 8 --seq_length 32 --batch_size 2".split()
SLURM = ["slurm", "--config", "config.yaml"]


@pytest.fixture(scope="module")
def run(script):
    work = "--seq_length 32 --batch_size 2 --max_steps 8 --save_every 4 --precision bf16"
    return script(*work.split(), "--no_eval", "--no_export")


def test_hours_are_tokens_divided_by_the_measured_rate(run):
    args = [*PLAN, "--dataset_tokens", 6420, "--epochs", 3, "--price", 2, "--watts", 500]
    found = planned(*args, "--results", run.folder)["cost"]
    tokens = 3 * 200 * 32  # in sequences of 32 tokens, 200 in an epoch
    hours = tokens / run.results["tokens_per_second"] / 3600
    assert found["tokens"] == tokens and found["steps"] == 3 * 100
    assert found["hours"] == found["gpu_hours"] == pytest.approx(hours)
    assert found["price"] == pytest.approx(2 * hours)
    assert found["energy_kwh"] == pytest.approx(0.5 * hours)
    assert found["sources"]["tokens_per_second_per_gpu"].startswith("measured")
    assert [warning for warning in found["warnings"] if "CPU" in warning]
    assert len(found["warnings"]) == 1  # the plan is the run's own work otherwise
    code, text = plan(*args, "--results", run.folder / "results.json")
    assert code == 0 and found["summary"] in text


def test_a_rate_is_not_carried_over_silently(run):
    """To four GPUs, another strategy, and smaller micro-batches with more accumulation."""
    args = [*PLAN, "--gpus", 4, "--tokens", 10**6, "--results", run.folder, "--gpu_memory", "1.06"]
    found = planned(*args)
    changed = ["strategy (dp", "world_size (1, planned: 4)"]
    text = " ".join(found["cost"]["warnings"])
    assert found["recommended"] != "dp" and all(words in text for words in changed)
    rate = run.results["tokens_per_second_per_gpu"]
    assert found["cost"]["gpu_hours"] == pytest.approx(10**6 / rate / 3600)
    assert found["cost"]["hours"] == pytest.approx(10**6 / rate / 3600 / 4)


@pytest.mark.slow
def test_the_rate_is_measured_with_the_planned_work():
    code, out = plan(*PLAN, "--max_steps", 100, "--measure", "--json")
    found = json.JSONDecoder().raw_decode(out)[0]["cost"]  # stderr follows
    assert code == 0 and found["tokens"] == 100 * 2 * 32
    rate = found["tokens_per_second_per_gpu"]
    assert rate > 0 and found["hours"] == pytest.approx(6400 / rate / 3600)
    assert "10 steps" in found["sources"]["tokens_per_second_per_gpu"]
    code, out = plan("--gpu_memory", 1, "--tokens", 5, "--device", "A100")
    assert code == 1 and "Nothing fits" in out


def test_a_measurement_that_fails_is_one_line(tmp_path):
    """A model without a tokenizer."""
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out = plan(*PLAN[2:], "--model", tmp_path, "--tokens", 100, "--measure")
    assert code == 1 and "tokenizer" in out.splitlines()[-1] and out.count("❌") == 1


def test_slurm_budget_of_a_run(run, run_file):
    """Jobs, and steps between two saves, from the times that the run measured."""
    args = [*SLURM, "--requeue", "--time_limit", "00:10:00", "--results", run.folder]
    code, out = setup(*args, "--max_steps", 10**6, "--mtbf", 2, cwd=run_file)
    assert code == 0, out
    rows = {
        line.split("  ")[0]: line.split("  ", 1)[1].split()[0]
        for line in out.splitlines()
        if "  " in line
    }
    steps = [record["seconds"] for record in run.metrics][run.results["warmup_steps_excluded"] :]
    step, save = sum(steps) / len(steps), max(run.results["checkpoint_seconds"])
    every = (2 * save * 2 * 3600) ** 0.5 / step
    assert float(rows["--save_every"].replace(",", "")) == pytest.approx(every, abs=1)
    usable = 600 - 120 - run.results["seconds_to_first_step"]
    jobs = 10**6 * step / (usable / (1 + save / (every * step)))
    assert float(rows["jobs"].replace(",", "")) == pytest.approx(jobs, rel=0.02)
    assert "✅" in out


def test_plan_counts_the_slurm_jobs_of_the_run():
    args = ["--model", "gpt2-xl", "--gpu_memory", 80, "--nodes", 2, "--gpus_per_node", 4]
    args += ["--tokens", 10**10, "--device", "A100"]
    hours = planned(*args)["cost"]["hours"]
    code, out = plan(*args, "--time_limit", "10:00:00", "--save_seconds", 60)
    # Of a job, 120 s of start-up and 120 s after the signal do not train.
    jobs = -(-hours // (10 - 240 / 3600))
    assert code == 0 and f"\njobs                {jobs:.0f} " in out, out
    code, out = plan(*args, "--time_limit", "10:00:00")
    assert code == 2 and "--save_seconds" in out.splitlines()[-1]


def test_slurm_signal_that_is_too_late(run_file):
    args = [*SLURM, "--requeue", "--hours", 9, "--save_seconds", 100, "--step_seconds", 30]
    code, out = setup(*args, "--force", cwd=run_file)
    assert code == 0 and "--signal_seconds 420" in out  # twice 190 s, in whole minutes
    code, out = setup(*args, "--signal_seconds", "420", cwd=run_file)
    assert code == 0 and "✅" in out
    assert "USR1@420 " in (run_file / "scripts" / "slurm_job.sh").read_text()
    code, out = setup(*args[:-4], cwd=run_file)
    assert code == 2 and "--save_seconds" in out


def results_with(**values):
    """An attack that changes values in the run's results.json."""

    def prepare(folder):
        file = folder / "results.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return prepare


def truncate(folder):
    (folder / "results.json").write_text((folder / "results.json").read_text()[:300])


def no_file(folder):
    (folder / "results.json").unlink()


@table(
    Attack("missing", prepare=no_file, says="No such file"),
    Attack("truncated", prepare=truncate, says="line"),
    Attack("failed", prepare=results_with(status="failed", reason="x"), says="failed"),
    Attack("no rate", prepare=results_with(tokens_per_second_per_gpu=None), says="trained"),
    Attack("another model", prepare=results_with(parameters=5), says="parameters .5, planned"),
)
def test_results_that_have_no_rate_for_the_plan(attack, run, tmp_path, main_of):
    shutil.copy(run.folder / "results.json", tmp_path)
    attack.prepare(tmp_path)
    attack.check(tmp_path, main_of("plan_memory", *PLAN, "--tokens", 9, "--results", tmp_path))


def test_results_without_a_save_give_no_slurm_budget(run, tmp_path, generate):
    shutil.copy(run.folder / "results.json", tmp_path)
    results_with(checkpoint_seconds=[])(tmp_path)
    attack = Attack("no saves", says="--save_seconds")
    attack.check(tmp_path, generate(*SLURM, "--hours", 9, "--results", tmp_path))
    assert not (tmp_path / "scripts").exists()
