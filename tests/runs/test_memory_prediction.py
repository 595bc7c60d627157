"""Memory is measured, simulated and predicted, and the three agree."""

import itertools
import json
import shutil

import pytest
from conftest import STRATEGIES, slow, soak
from memory_checks import WORK, assert_as_predicted, planned, simulate
from transformers import LlamaConfig

LLAMA = "--model {llama} --dataset pydocs"
ADAPTERS = "--lora_r 8 --lora_targets q_proj,down_proj"
# Each strategy, each number of ranks and both precisions at least once; the soak has the product.
COVERING = [
    ("dp", 1, "fp32", ""),
    ("zero1", 1, "bf16", ""),
    ("zero2", 8, "fp32", ""),
    ("zero2", 2, "bf16", "--gradient_checkpointing"),
    ("zero3", 4, "bf16", ""),
    ("offload", 2, "fp32", ""),
    ("infinity", 2, "bf16", ""),
    ("fsdp", 8, "bf16", ""),
    ("zero2", 2, "bf16", "--reduce_dtype fp32"),
    slow("zero3", 2, "bf16", "--reduce_dtype fp32"),
    slow("offload", 2, "fp32", "--reduce_dtype bf16"),
    slow("fsdp", 2, "fp32", "--reduce_dtype fp16 --gradient_accumulation_steps 2"),
    slow("fsdp", 2, "bf16", "--reduce_dtype bf16"),
    slow("dp", 2, "bf16", "--lora_r 8"),
    slow("dp", 2, "bf16", f"{LLAMA} --lora_r 8 --lora_dora"),
    slow("zero2", 2, "fp32", "--lora_r 8 --lora_dora --lora_targets all-linear"),
    slow("fsdp", 2, "bf16", "--lora_r 8 --lora_dora"),
    slow("dp", 2, "fp32", "--compile"),
    slow("zero2", 2, "bf16", "--compile"),
    slow("dp", 2, "fp32", "--compile_loss"),
    slow("zero2", 2, "bf16", "--compile_loss"),
    slow("fsdp", 2, "bf16", "--lora_r 8"),
    slow("dp", 2, "bf16", LLAMA),
    slow("dp", 2, "bf16", "--bf16_blocks"),
    slow("dp", 2, "bf16", f"{LLAMA} --bf16_blocks"),
    soak("fsdp", 2, "bf16", LLAMA),
    slow("zero3", 2, "fp32", f"{LLAMA} --isolate_documents --seq_length 128"),
    # Stage 3 replaces linear layers by its own, which keep their inputs although frozen.
    slow("zero3", 2, "bf16", f"{LLAMA} {ADAPTERS}"),
]
PRODUCT = [
    soak(*case, model)
    for case in itertools.product(STRATEGIES, (1, 2, 4, 8), ("fp32", "bf16"))
    for model in ("", "--model gpt2 --from_scratch --dataset pydocs")
]


@pytest.mark.parametrize("strategy, ranks, precision, args", [*COVERING, *PRODUCT])
def test_prediction_is_what_a_simulation_holds(script, llama, strategy, ranks, precision, args):
    check_prediction(script, strategy, ranks, precision, *args.format(llama=llama).split())


def check_prediction(script, strategy, ranks, precision, *args):
    """Simulate a rank, and compare its memory with the prediction."""
    flags = [*WORK, "--strategy", strategy, "--precision", precision, *args]
    run = simulate(script, *flags, ranks=ranks, timeout=900)
    assert run.results["simulated_world_size"] == ranks
    assert_as_predicted(run.results["memory"], run.results["strategy"], run.results["precision"])
    return run


@pytest.mark.slow
@pytest.mark.parametrize("strategy, args", [("dp", ["--gradient_checkpointing"]), ("fsdp", [])])
def test_prediction_of_the_norms_of_dora(script, tiny_tokenizer, tmp_path, strategy, args):
    """Of a layer with 2,048 inputs, which are the largest tensors of the step."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2}
    LlamaConfig(**sizes, vocab_size=300, num_attention_heads=4).save_pretrained(tmp_path)
    shutil.copytree(tiny_tokenizer, tmp_path, dirs_exist_ok=True)
    dora = "--lora_r 8 --lora_dora --lora_targets all-linear".split()
    model = ["--model", tmp_path, "--from_scratch", "--dataset", "pydocs"]
    run = check_prediction(script, strategy, 2, "bf16", *model, *dora, *args)
    [step] = run.results["memory"]["step_bytes_by_rank"]
    identity = (4 if strategy == "dp" else 2) * 2048**2
    assert max(phase["peak"] for phase in step.values()) - step["update"]["peak"] > identity


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", *map(soak, ("mistral", "qwen2"))])
def test_prediction_for_other_families(script, tiny_tokenizer, tmp_path, family):
    """From a config.json of each, with random weights; also the planner's own reading of that file."""
    config = {"model_type": family, "vocab_size": 500, "hidden_size": 96, "intermediate_size": 272}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 128}
    config |= {"bos_token_id": 0, "eos_token_id": 0}
    config |= {} if family == "gpt_neox" else {"num_key_value_heads": 2, "rms_norm_eps": 1e-6}
    config |= {"head_dim": 24, "tie_word_embeddings": True} if family == "qwen3" else {}
    for file in tiny_tokenizer.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", tmp_path, "--from_scratch", "--dataset", "pydocs"]
    run = check_prediction(script, "zero2", 2, "bf16", *model)
    found = planned("--model", tmp_path, "--gpus", 2, "--gpu_memory", 16)
    assert found["parameters"] == run.results["parameters"]


def test_simulation_trains_nothing_and_says_so(script):
    run = simulate(script, *WORK, "--strategy", "zero2", ranks=4)
    assert "simulation" in run.out and "Loss" not in run.out and "Training Complete" not in run.out
    assert run.losses == [] and not (run.folder / "hf").exists()
    expected = {"status": "completed", "world_size": 1, "simulated_world_size": 4}
    expected |= dict.fromkeys(("train_loss_last", "samples_per_second", "eval_loss"))
    assert run.results.items() >= expected.items()


@pytest.mark.parametrize(
    "args, said",
    [
        (["--simulate_gpus", "2", "--save_every", "2"], "--save_every"),
        (["--simulate_gpus", "2", "--max_steps", "1"], "--max_steps 2"),
        (["--memory_snapshot", "file.pickle"], "no GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused(script, args, said):
    run = script(*args, ok=False)
    assert run.code == 2 and said in run.error
