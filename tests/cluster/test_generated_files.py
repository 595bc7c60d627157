"""Every file that scripts/distributed_setup.py generates trains."""

import json

import pytest
from cluster_work import WORK, setup
from conftest import assert_close, finish, start

OFFLOAD_ALL = ["--offload_optimizer", "--offload_param"]


@pytest.mark.parametrize(
    "args, strategy",
    [
        (["--zero_stage", "2", "--offload_optimizer", "--bf16"], "offload"),
        (["--zero_stage", "3"], "zero3"),
        (["--zero_stage", "3", *OFFLOAD_ALL, "--nvme_path", "NVME"], "infinity"),
    ],
)
def test_deepspeed_file_is_valid_and_trains(script, tmp_path, args, strategy):
    args = [str(tmp_path) if arg == "NVME" else arg for arg in args]
    code, out = setup("deepspeed", *args, "--output", "config/ds_config.json", cwd=tmp_path)
    assert code == 0, out
    precision = [] if "--bf16" in args else ["--precision", "fp32"]
    work = ["--seq_length", "32", "--max_steps", "2", "--no_eval", "--no_export", *precision]
    file = tmp_path / "config" / "ds_config.json"
    run = script("--ds_config", file, "--batch_size", "2", *work)
    assert run.results["strategy"] == strategy and run.results["batch_size"] == 2
    assert run.results["precision"] == ("bf16" if "--bf16" in args else "fp32")


@pytest.mark.parametrize(
    "strategy, said",
    [("SHARD_GRAD_OP", ""), ("HYBRID_SHARD", "FULL_SHARD"), ("NO_SHARD", "--strategy dp")],
)
def test_fsdp_file_trains_the_same_model(script, alone, tmp_path, strategy, said):
    flags = ["--sharding_strategy", strategy, "--mixed_precision", "FLOAT32"]
    code, out = setup("fsdp", *flags, "--output", "f.json", cwd=tmp_path)
    assert code == 0, out
    fsdp = ["--strategy", "fsdp", "--fsdp_config", tmp_path / "f.json"]
    run = script(*WORK, *fsdp, launcher="torchrun", ranks=2)
    assert said in run.out
    assert_close(run.losses, alone.losses, 1e-5)


def test_every_key_of_accelerates_fsdp_file_is_answered(script, alone, tmp_path):
    unused = {
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_backward_prefetch_policy": "BACKWARD_POST",
        "fsdp_use_orig_params": False,
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
        command = ["bash", script_file, "--output_dir", run_file / launcher]
        process = start(command, cwd=run_file)
        _, err = finish(process, 120)
        assert process.returncode == 0, err
        results = json.loads((run_file / launcher / "results.json").read_text())
        found = results["launcher"], results["world_size"], results["strategy"]
        assert found == (launcher, 2, "zero1")


@pytest.mark.parametrize(
    "args, said",
    [
        (["deepspeed", "--bf16", "--fp16"], "--bf16 and --fp16"),
        (["deepspeed", "--zero_stage", "2", "--offload_param"], "--zero_stage 3"),
        (["deepspeed", "--zero_stag", "2"], "--zero_stag"),
        (["launcher", "--config", "config.yaml", "--num_nodes", "2"], "--master_addr"),
        (["slurm", "--config", "config.yaml", "--time_limit", "soon"], "HH:MM:SS"),
        (["launcher", "--config", "nothing.yaml"], "nothing.yaml"),
        (["fsdp", "--sharding_strategy", "HALF_SHARD"], "FULL_SHARD"),
    ],
)
def test_generator_refuses(run_file, args, said):
    code, out = setup(*args, cwd=run_file)
    assert code == 2 and said in out
