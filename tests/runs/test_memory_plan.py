"""scripts/plan_memory.py plans what a run needs, without torch, and recommends what fits."""

import json
import shlex
from collections import Counter

import pytest
from conftest import PROJECT, STRATEGIES, finish, slow
from memory_checks import plan, planned

from distributed_training.cli.parse import parse_arguments


def test_plan_recommends_a_command_that_runs(begin, tmp_path):
    args = ["--model", "tiny-gpt2", "--gpus", "2", "--gpu_memory", "1.15", "--seq_length", "32"]
    code, out = plan(*args)
    assert code == 0 and all(strategy in out for strategy in STRATEGIES)
    line = next(line for line in out.splitlines() if line.strip().startswith("torchrun"))
    flags = ["--max_steps", "1", "--no_eval", "--no_export", "--output_dir", tmp_path / "out"]
    process = begin([*shlex.split(line), *flags])
    _, err = finish(process, 120)
    assert process.returncode == 0, err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["world_size"] == 2 and results["strategy"] == planned(*args)["recommended"]


def test_plan_fits_a_terminal_and_explains_its_peak():
    args = ["--model", "gpt2-xl", "--gpus", 4, "--gpu_memory", 16]
    _, text = plan(*args, "--explain")
    assert [line for line in text.splitlines() if len(line) > 80 and "torchrun" not in line] == []
    for need in planned(*args, "--explain")["strategies"].values():
        sums = Counter()
        for term in need["terms"]:
            sums.update(dict.fromkeys(term["phases"], term["size"]))
        assert sums.pop("host", 0) == need["host_bytes"]
        assert sums.pop("nvme", 0) == need["nvme_bytes"]
        assert max(sums.values()) == need["peak_bytes"], need["strategy"]


@pytest.mark.parametrize("strategy", ["zero2", slow("dp")])
def test_plan_of_a_cpu_is_the_memory_of_its_process(script, strategy):
    work = ["--seq_length", "256", "--batch_size", "4", "--precision", "fp32"]
    flags = ["--strategy", strategy, "--max_steps", "2", "--no_eval", "--no_export"]
    [peak] = script(*work, *flags, real=True).results["memory"]["host_peak_bytes"]
    need = planned("--model", "tiny-gpt2", *work)["strategies"][strategy]
    assert need["total_bytes"] == pytest.approx(peak, rel=0.15)


def test_plan_finds_the_command_for_long_sequences():
    args = ["--model", "llama-2-7b", "--gpu_memory", "24", "--lora_r", "16"]
    found = planned(*args, "--seq_length", 4096)
    assert "--model meta-llama/Llama-2-7b-hf" in found["command"]
    assert "--gradient_checkpointing" in found["command"]
    in_4bit = [*planned(*args, "--load_in_4bit")["strategies"]]
    assert in_4bit == ["dp", "zero1", "zero2", "offload", "fsdp"]
    assert [*planned(*args, "--optim", "adafactor")["strategies"]] == ["dp"]


RUN_FILE = """
model: llama-2-7b
training: {batch_size: 4, gradient_accumulation_steps: 2, seq_length: 1024}
lora_r: 16
packing: true
gradient_checkpointing: true
strategy: zero2
dataset: chat.jsonl
max_steps: 100
"""
SAME_WORK = [
    *"--model llama-2-7b --seq_length 1024 --lora_r 16 --gradient_checkpointing".split(),
    *"--gradient_accumulation_steps 2 --isolate_documents".split(),
]


def test_plan_of_a_run_file_is_that_of_its_flags(tmp_path):
    """It answers for the file's strategy, and the command line overrides the file."""
    file = tmp_path / "run.yaml"
    file.write_text(RUN_FILE)
    own = planned("--config", file, "--gpu_memory", 24, "--gpus", 2, "--device", "A100")
    flags = planned(*SAME_WORK, "--gpu_memory", 24, "--gpus", 2)
    assert own["strategies"] == flags["strategies"]
    assert (own["recommended"], flags["recommended"]) == ("zero2", "dp")
    assert own["config"] == {"file": str(file), "strategy": "zero2", "fits": True}
    assert own["cost"]["steps"] == 100
    launcher = "torchrun --nproc_per_node=2 real_model_example.py"
    assert own["command"] == f"{launcher} --config {file}"
    other = ["--batch_size", "2", "--gradient_accumulation_steps", "1", "--precision", "fp16"]
    changed = planned("--config", file, "--gpu_memory", 24, *other)
    assert changed["command"].startswith(f"python real_model_example.py --config {file} ")
    settings = parse_arguments(shlex.split(changed["command"])[2:])
    found = (
        settings.parallelism.strategy,
        settings.training.batch_size,
        settings.training.gradient_accumulation_steps,
        settings.training.precision,
    )
    assert found == ("zero2", 2, 1, "fp16")
    alike = planned(*SAME_WORK, "--gpu_memory", 24, *other)
    assert changed["strategies"] == alike["strategies"]


def test_a_run_file_that_does_not_fit(tmp_path):
    """The command changes what must be changed, and the exit code tells a script."""
    file = tmp_path / "run.yaml"
    file.write_text("model: gpt2-xl\nbatch_size: 8\nseq_length: 1024\nlr: 1e-4\n")
    settings = ["--config", file, "--gpus", 4, "--gpu_memory", 16]
    code, out = plan(*settings)
    assert code == 1 and f"{file}: dp does not fit" in out
    found = planned(*settings)
    assert found["config"]["fits"] is False and found["recommended"] != "dp"
    settings = parse_arguments(shlex.split(found["command"])[3:])
    assert (settings.parallelism.strategy, settings.training.lr) == (found["recommended"], 1e-4)
    assert settings.training.batch_size * settings.training.gradient_accumulation_steps == 8


@pytest.mark.parametrize(
    "text, said",
    [
        ("batch_sise: 2", "run.yaml: unknown argument --batch_sise"),
        ("deepspeed: DS", "this project's DeepSpeed files"),
        ("model: gpt2\nseq_length: 2048", "1024"),
    ],
)
def test_a_run_file_that_cannot_be_planned(tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text.replace("DS", str(PROJECT / "ds_config_stage2.json")))
    code, out = plan("--config", tmp_path / "run.yaml", "--gpu_memory", 16)
    assert code == 2 and said in out


def test_plan_reads_other_models_from_the_hub_and_its_cache(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    args = ["--model", "openai-community/gpt2", "--gpu_memory", "24"]
    parameters = planned(*args)["parameters"]
    code, out = plan("--model", "someone/nothing", "--gpu_memory", "24")
    assert code == 2 and "someone/nothing" in out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert planned(*args)["parameters"] == parameters  # from the cache
    code, out = plan("--model", "someone/nothing", "--gpu_memory", "24")
    assert code == 2 and "HF_HUB_OFFLINE is set" in out


def test_solved_batch_fits_and_the_next_does_not():
    args = ["--model", "gpt2-xl", "--gpus", 4, "--gpu_memory", 24]
    batch = solved("batch", *args)
    assert 0 < batch["zero1"] < batch["infinity"]
    for more, fits in ((0, True), (1, False)):
        need = planned(*args, "--batch_size", batch["zero1"] + more)["strategies"]["zero1"]
        assert (need["fits"], need["largest_batch"]) == (fits, batch["zero1"])
        assert need["largest_batch_with_checkpointing"] > batch["zero1"]


def solved(question, *args):
    """The answers of --solve by strategy."""
    return json.loads(plan(*args, "--solve", question, "--json")[1])["answers"]


def test_solved_gpus_fit_and_one_less_does_not():
    args = ["--model", "gpt2-xl", "--gpu_memory", 16]
    gpus = solved("gpus", *args)
    assert gpus["dp"] is None and gpus["zero3"] > 1
    for number, fits in ((gpus["zero3"], True), (gpus["zero3"] - 1, False)):
        assert planned(*args, "--gpus", number)["strategies"]["zero3"]["fits"] == fits


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["--model", "FOLDER", "--gpu_memory", "16"], 2, "has no config.json"),
        (["--gpu_memory", "16", "--nodes", "2", "--gpus", "2"], 2, "--nodes and --gpus"),
        (["--gpu_memory", "16", "--seq_length", "2048"], 2, "1024"),
        (["--model", "CONFIG", "--gpu_memory", "16"], 2, "bert"),
        (["--model", "gpt2-xl", "--gpu_memory", "1.5"], 1, "Nothing fits"),
    ],
)
def test_plan_that_cannot_be_made(tmp_path, args, code, said):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 768}')
    (tmp_path / "empty").mkdir()
    paths = {"CONFIG": tmp_path / "config.json", "FOLDER": tmp_path / "empty"}
    found, out = plan(*[paths.get(arg, arg) for arg in args])
    assert found == code and said in out


def test_config_that_leaves_things_out_has_transformers_defaults(tmp_path):
    """The number of parameters is that of transformers' own model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 32}
    sizes |= {"intermediate_size": 96, "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = tmp_path / "config.json"
    for family in ("mistral", "qwen2", "qwen3", "gpt_neox", "llama", "gpt2"):
        own = {k: v for k, v in sizes.items() if k.startswith("n_") == (family == "gpt2")}
        config.write_text(json.dumps({"model_type": family, **own}))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        whole = sum(parameter.numel() for parameter in model.parameters())
        found = planned("--model", config, "--gpu_memory", 80)["parameters"]
        assert found == whole, family
