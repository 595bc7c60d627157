"""Wrong command lines of the scripts in scripts/ end with exit code 2 and one line."""

import json

import pytest

PLAN = "plan_memory --gpu_memory 16"


@pytest.mark.parametrize(
    "command, says",
    [
        ("plan_memory --gpu_memory nan", "--gpu_memory"),
        (f"{PLAN},0", "--gpu_memory: 0 is not"),
        (f"{PLAN},-8", "--gpu_memory: -8 is not"),
        (f"{PLAN},x", "--gpu_memory: x is not"),
        (f"{PLAN},,8", "--gpu_memory: '' is not"),
        (f"{PLAN},8 --gpus 3", "--gpu_memory has 2 values for 3 GPUs"),
        (f"{PLAN},8 --nodes 2 --gpus_per_node 2", "--gpu_memory has 2 values for 4 GPUs"),
        (f"{PLAN},8 --solve gpus", "--solve gpus needs equal GPUs"),
        (f"{PLAN} --gpu_speeds 1,0.5 --solve gpus", "--solve gpus needs equal GPUs"),
        (f"{PLAN} --gpus 2 --gpu_speeds 1", "--gpu_speeds has 1 value for 2 GPUs"),
        (f"{PLAN} --gpu_speeds 1,0", "--gpu_speeds: 0 is not"),
        (f"{PLAN} --gpu_speeds=", "--gpu_speeds: '' is not"),
        (f"{PLAN} --gpu_memori 16", "did you mean --gpu_memory"),
        (f"{PLAN} --price 2", "one amount of work"),
        (f"{PLAN} --tokens 5", "one rate"),
        (f"{PLAN} --tokens 5 --measure --mfu 0.3", "--mfu needs --device"),
        (f"{PLAN} --tokens 5 --device A100 --solve batch", "--solve"),
        (f"{PLAN} --tokens 5 --device Z80", "H100"),
        (f"{PLAN} --tokens 5 --device A100 --mfu 1.5", "--mfu"),
        ("convert_checkpoint x", "--inspect"),
        ("convert_checkpoint x --to hf", "OUT"),
        ("compare_runs no-such", "no such folder"),
        ("compare_runs . --tolerance nan", "--tolerance"),
    ],
)
def test_wrong_flags_of_a_script_are_refused(main_of, command, says):
    run = main_of(*command.split())
    assert run.code == 2 and says in run.error and run.err.count("\n") == 1


@pytest.mark.parametrize("content, says", [([], "object"), ({"n_layer": "many"}, "n_layer")])
def test_wrong_config_json_of_the_planner_is_refused(main_of, tmp_path, content, says):
    sizes = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "vocab_size": 9, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(content and sizes | content))
    run = main_of(*PLAN.split(), "--model", tmp_path / "config.json")
    assert run.code == 2 and says in run.error
