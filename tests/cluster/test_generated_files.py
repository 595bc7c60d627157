"""The files that scripts/distributed_setup.py generates: they train, and no value is executed."""

import json
import re
from pathlib import Path

import pytest
from cluster_work import WORK, setup
from conftest import assert_close, finish, skip_without_libaio, slow, start
from generated_scripts import LAUNCHER, SLURM

OFFLOAD_ALL = ["--offload_optimizer", "--offload_param"]


@pytest.mark.parametrize(
    "args, strategy",
    [
        (["--zero_stage", "2", "--offload_optimizer", "--bf16"], "offload"),
        (["--zero_stage", "3", *OFFLOAD_ALL, "--nvme_path", "NVME"], "infinity"),
    ],
)
def test_deepspeed_file_trains_with_the_batch_size_of_the_run(script, tmp_path, args, strategy):
    if strategy == "infinity":
        skip_without_libaio()
    args = [str(tmp_path) if arg == "NVME" else arg for arg in args]
    code, out = setup("deepspeed", *args, cwd=tmp_path)
    assert code == 0, out
    precision = [] if "--bf16" in args else ["--precision", "fp32"]
    work = ["--seq_length", "32", "--max_steps", "2", "--no_eval", "--no_export", *precision]
    file = tmp_path / "config" / "ds_config.json"
    run = script("--ds_config", file, "--batch_size", "2", *work)
    assert run.results["strategy"] == strategy and run.results["batch_size"] == 2
    assert run.results["precision"] == ("bf16" if "--bf16" in args else "fp32")


@pytest.mark.parametrize(
    "strategy, said",
    [("SHARD_GRAD_OP", ""), slow("HYBRID_SHARD", "FULL_SHARD"), slow("NO_SHARD", "--strategy dp")],
)
def test_fsdp_file_trains_the_same_model(script, alone, tmp_path, strategy, said):
    flags = ["--sharding_strategy", strategy, "--mixed_precision", "FLOAT32"]
    code, out = setup("fsdp", *flags, "--output", "f.json", cwd=tmp_path)
    assert code == 0, out
    fsdp = ["--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json"]
    run = script(*WORK, *fsdp, launcher="torchrun", ranks=2)
    assert said in run.out
    assert_close(run.losses, alone.losses, 1e-5)


def test_fsdp_reduces_gradients_in_bf16_if_its_file_says_so(script, alone, tmp_path):
    (file := tmp_path / "f.json").write_text('{"fsdp_reduce_dtype": "bfloat16"}')
    fsdp = ["--strategy", "fsdp", "--fsdp_config", file]
    run = script(*WORK, *fsdp, launcher="torchrun", ranks=2)
    assert_close(run.losses, alone.losses, 2e-3)
    assert "reduce_scatter bfloat16" in run.results["communication_per_step"]
    assert run.results["run_signature"]["told"]["reduce_dtype"] == "bf16"


def test_every_key_of_accelerates_fsdp_file_is_answered(script, alone, tmp_path):
    unused = {
        "fsdp_backward_prefetch_policy": "BACKWARD_POST",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_cuda_graphs": True,
    }
    used = {
        "fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_forward_prefetch": True,
        "fsdp_sync_module_states": True,
        "fsdp_mixed_precision": "NO",
        "fsdp_offload_params": True,
    }
    (tmp_path / "f.json").write_text(json.dumps(used | unused))
    work = [arg for arg in WORK if arg not in ("--precision", "fp32")]
    fsdp = ["--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json"]
    run = script(*work, *fsdp, launcher="torchrun", ranks=2)
    for key in (name.removeprefix("fsdp_") for name in unused):
        assert len([line for line in run.out.splitlines() if f"fsdp_{key}" in line]) == 1, key
    assert "no layer of class LlamaDecoderLayer" in run.out and "GPT2Block" in run.out
    assert_close(run.losses, alone.losses, 1e-5)
    (tmp_path / "f.json").write_text('{"fsdp_sharding_strateg": "FULL_SHARD"}')
    refused = script("--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json", ok=False)
    assert refused.code == 2 and "did you mean fsdp_sharding_strategy" in refused.error


@pytest.mark.slow
def test_launcher_scripts_run(script, alone, run_file):
    for args, launcher in [(["--use_deepspeed"], "deepspeed"), ([], "torchrun")]:
        flags = ["--config", "config.yaml", "--num_gpus_per_node", "2", *args, "--force"]
        code, out = setup("launcher", *flags, cwd=run_file)
        assert code == 0, out
        script_file = run_file / "scripts" / "run_training.sh"
        process = start(["bash", script_file, "--output_dir", run_file / launcher], cwd=run_file)
        _, err = finish(process, 120)
        assert process.returncode == 0, err
        results = json.loads((run_file / launcher / "results.json").read_text())
        found = results["launcher"], results["world_size"], results["strategy"]
        assert found == (launcher, 2, "zero1")


TWO_NODES = ["--num_nodes", "2", "--master_addr", "n1"]
# Flags of a generated script, what starts the ranks, and arguments that it gets.
STARTED_BY = {
    "one node": (LAUNCHER, "torchrun", ["--standalone"]),
    "one node and a port": ([*LAUNCHER, "--master_port", "4000"], "torchrun", ["4000"]),
    "one node and deepspeed": ([*LAUNCHER, "--use_deepspeed"], "deepspeed", ["29500"]),
    "two nodes": ([*LAUNCHER, *TWO_NODES], "torchrun", ["--nnodes=2", "29500"]),
    "two nodes and deepspeed": ([*LAUNCHER, *TWO_NODES, "--use_deepspeed"], "torchrun", ["29500"]),
    "a job of two nodes": ([*SLURM, "--num_nodes", "2", "--use_deepspeed"], "srun", ["torchrun"]),
    "a job that is requeued": ([*SLURM, "--requeue", "--use_deepspeed"], "srun", ["--resume"]),
}


@pytest.mark.parametrize("case", STARTED_BY)
def test_what_starts_the_ranks(generate, stubs, tmp_path, case):
    """Where --use_deepspeed cannot be followed, the program and its file say what is used."""
    flags, program, arguments = STARTED_BY[case]
    run = generate(*flags, "--output", "made.sh")
    text = Path("made.sh").read_text()
    replaced = "--use_deepspeed" in flags and program != "deepspeed"
    for said in (run.out, text):
        assert ("strategy is unchanged" in said) == replaced, said
    assert ("script on each node" in text) == ("--master_addr" in flags)
    job = stubs.run(["bash", "made.sh"], tmp_path)
    assert job.code == 0, job.err
    [call] = stubs.calls(program)
    for argument in arguments:
        assert argument in call or any(part.endswith(f"={argument}") for part in call), call


@pytest.mark.parametrize(
    "args, said",
    [
        (["deepspeed", "--bf16", "--fp16"], "--bf16 and --fp16"),
        (["deepspeed", "--zero_stage", "2", "--offload_param"], "--zero_stage 3"),
        ([*LAUNCHER, "--num_nodes", "2"], "--master_addr"),
        ([*SLURM, "--time_limit", "soon"], "HH:MM:SS"),
        (["launcher", "--config", "nothing.yaml"], "nothing.yaml"),
        (["slurm", "--config", "wrong.yaml"], "did you mean --learning_rate"),
        (["fsdp", "--sharding_strategy", "HALF_SHARD"], "FULL_SHARD"),
    ],
)
def test_generator_refuses(generate, args, said):
    Path("wrong.yaml").write_text("lerning_rate: 1")
    run = generate(*args)
    assert run.code == 2 and said in run.error and not Path("scripts").exists()


# A flag that takes any text, and what the generated script starts.
TARGETS = {
    "master_addr": ([*LAUNCHER, "--num_nodes", "2", "--master_addr"], "torchrun"),
    "output": ([*SLURM, "--output"], "srun"),
    "config": (["launcher", "--config"], "torchrun"),
    "venv": ([*SLURM, "--venv"], "srun"),
    "account": ([*SLURM, "--requeue", "--account"], "srun"),
}
PAYLOADS = {
    "line end": "x\ntouch executed",
    "command substitution": "$(touch executed)",
    "quotes": "'; touch executed; '",
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_value_is_executed(generate, stubs, tmp_path, target, payload):
    """One line refuses it, or in bash the file does what it does with any other value."""
    (flags, started), value = TARGETS[target], PAYLOADS[payload]
    if target == "config":
        Path(value).write_text("batch_size: 2\n")
    if target == "venv":
        (Path(value) / "bin").mkdir(parents=True)
        (Path(value) / "bin" / "activate").write_text("true\n")
    before = set(tmp_path.rglob("*"))
    run = generate(*flags[:-1], f"{flags[-1]}={value}")
    new = set(tmp_path.rglob("*")) - before
    if run.code == 2:
        assert run.error and not new
        return
    [written] = [path for path in new if path.is_file()]
    for line in written.read_text().splitlines():
        if line.startswith("#SBATCH"):
            assert re.match(r"#SBATCH --[a-z-]+(=[^ ]+)?( +#.*)?$", line), line
    stubs.run(["bash", written], cwd=tmp_path)
    assert stubs.calls(started) and not list(tmp_path.rglob("executed"))


@pytest.mark.parametrize("flags", [["fsdp"], LAUNCHER, SLURM], ids=["fsdp", "launcher", "slurm"])
def test_an_existing_file_is_replaced_only_with_force(generate, flags):
    assert generate(*flags).code == 0
    [file] = [*Path("scripts").glob("*"), *Path("config").glob("*")]
    assert bool(file.stat().st_mode & 0o100) == (flags != ["fsdp"])
    file.write_text("edited")
    assert generate(*flags).code == 2 and file.read_text() == "edited"
    assert generate(*flags, "--force").code == 0 and file.read_text() != "edited"
