"""What a start imports; most of the time until the first step is spent on imports."""

import os
import subprocess
import sys

import pytest
from conftest import PROJECT, SCRIPT, slow

SCRIPTS = PROJECT / "scripts"
PLAN = [SCRIPTS / "plan_memory.py", "--model", "gpt2", "--gpu_memory", "16"]

ONE_STEP = "--max_steps 1 --batch_size 1 --seq_length 32 --no_eval --no_export --overwrite".split()


def imported_by(*command, **env) -> tuple[int, set[str]]:
    """The exit code of a command, and the modules that it imports."""
    timed = [sys.executable, "-X", "importtime", *command]
    run = subprocess.run(timed, capture_output=True, text=True, env={**os.environ, **env})
    lines = [line for line in run.stderr.splitlines() if line.startswith("import time:")]
    return run.returncode, {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    ("command", "code"), [([SCRIPT, "--help"], 0), ([SCRIPT, "--strategy", "none"], 2), (PLAN, 0)]
)
def test_help_errors_and_plans_import_only_small_modules(command, code):
    actual, modules = imported_by(*command)
    assert actual == code and "argparse" in modules
    heavy = {"torch", "numpy", "transformers", "tokenizers", "datasets", "deepspeed", "matplotlib"}
    slow_in_the_standard_library = {"email.message", "http.client", "urllib.request", "asyncio"}
    assert not modules & (heavy | slow_in_the_standard_library)


@pytest.mark.parametrize("program", [SCRIPT, SCRIPTS / "build_ops.py"], ids=["run", "script"])
def test_without_the_packages_one_line_names_the_environment(program):
    """As with the Python of the system, when the environment is not active."""
    done = subprocess.run([sys.executable, "-S", program], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "source .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("verbose", [True, False])
def test_a_run_file_may_ask_for_tracebacks(tmp_path, verbose):
    file = tmp_path / "run.yaml"
    file.write_text(f"resume: nowhere\noutput_dir: {tmp_path}\nverbose: {verbose}\n")
    command = [sys.executable, SCRIPT, "--config", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and ("Traceback" in done.stderr) == verbose


def test_dp_imports_no_library_of_other_strategies_and_features(script, tmp_path, monkeypatch):
    """And leaves nothing in the temporary folder, where torch would create one for compiled code."""
    text = tmp_path / "text.txt"
    text.write_text("A short text about nothing. " * 200)
    flags = [*ONE_STEP, "--dataset", text, "--cache_dir", tmp_path / "cache"]
    script(*flags, "--prefetch")  # the tokens are cached now
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    code, modules = imported_by(SCRIPT, *flags, "--output_dir", tmp_path / "out")
    assert not [*(tmp_path / "temporary").iterdir()]
    assert code == 0 and "transformers" in modules
    libraries = {"datasets", "deepspeed", "peft", "matplotlib", "tensorboard", "wandb"}
    # The compiler itself takes as long as the rest of torch; transformers imports torch._dynamo.
    others = {"pandas", "pyarrow", "bitsandbytes", "requests", "torch._inductor.compile_fx"}
    assert not modules & (libraries | others)
    # Of this project it loads no tool, no other engine, and nothing of flags that are not given.
    own = {name.partition(".")[2] for name in modules if name.startswith("distributed_training.")}
    tools = {name for name in modules if name.startswith("tools.")}
    assert tools == {"tools.hooks", "tools.plan", "tools.plan.run_plan"}
    of_flags = "model.lora model.isolation model.push model.generate model.export run.prompts"
    of_flags += " run.trackers run.profiling ranks.restart ranks.compiler checkpoints.find cli.hub"
    of_flags += " data.chat data.chat_template data.streaming data.tokenize"
    of_flags += " optimizers.adamw_8bit optimizers.adafactor optimizers.muon optimizers.sgd"
    others = {f"strategies.{name}" for name in ("deepspeed.options", "fsdp.shards")}
    assert "run.run_end" in own and not own & ({*of_flags.split()} | others)


@pytest.mark.parametrize("strategy", ["dp", slow("zero2"), slow("fsdp")])
def test_a_run_has_loaded_its_code_before_it_trains(tmp_path, strategy):
    """A change of the installation during a long run must not lose its results."""
    flags = "--max_steps 1 --batch_size 1 --seq_length 32 --eval_samples 2 --generate a".split()
    flags += ["--strategy", strategy, "--output_dir", tmp_path]
    command = [sys.executable, "-X", "importtime", SCRIPT, *flags]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.run(command, **streams)
    before, started, after = run.stdout.partition("Starting Training")
    assert run.returncode == 0 and started and "tools.plan.run_plan" in before
    loaded = {
        line.rpartition("|")[2].strip() for line in after.splitlines() if "import time" in line
    }
    own = {name for name in loaded if name.startswith(("distributed_training", "tools"))}
    # The tensors of DeepSpeed's optimizer exist after its first step only.
    assert own <= {"distributed_training.strategies.deepspeed.live_states"}


def test_deepspeed_imports_no_compiler(tmp_path):
    """DeepSpeed has compiled functions of an optimizer that no strategy uses."""
    out = ["--output_dir", tmp_path / "out"]
    code, modules = imported_by(SCRIPT, *ONE_STEP, "--strategy", "zero2", *out)
    assert code == 0 and "deepspeed" in modules
    assert "torch._inductor.compile_fx" not in modules
