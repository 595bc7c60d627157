"""recipes/*.yaml: their commands are valid, they fit the GPUs that they name, and they train.

The runs are those of a user, with the recipe's names of models and datasets: the stand-in for the
hub has small ones under these names.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import documents
import pytest
import yaml
from conftest import PROJECT, skip, slow
from local_hub import GPT2, WIKITEXT, serving, write_gpt2, write_wikitext

from distributed_training.cli.parse import read_command_line
from distributed_training.units import GB
from tools.plan.rate import human_time

RECIPES = sorted(path.name for path in (PROJECT / "recipes").glob("*.yaml"))
TWO = {"launcher": "torchrun", "ranks": 2}


def read(name):
    """The file, its text, what follows each keyword of its first comment, and what it sets."""
    text = (PROJECT / "recipes" / name).read_text("utf-8")
    comment = "".join(re.findall(r"^#(.*\n)", text.partition("\n\n")[0], re.MULTILINE))
    about = dict(re.findall(r"^ (Start|Plan|Memory|Time|Loss): +(.*(?:\n {5,}.*)*)", comment, re.M))
    commands = {key: re.sub(r"\\\n +", "", about[key]) for key in ("Start", "Plan")}
    return SimpleNamespace(
        file=f"recipes/{name}",
        comment=comment,
        about={key: " ".join(value.split()) for key, value in about.items()},
        start=shlex.split(commands["Start"]),
        plan=shlex.split(commands["Plan"]),
        values=yaml.safe_load(text),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_of_a_recipe_is_valid_and_uses_each_of_its_keys(name):
    recipe = read(name)
    assert recipe.start[recipe.start.index("--config") + 1] == recipe.file
    assert documents.unknown_flags(recipe.start) == []
    assert documents.usage_error(recipe.start) == ""
    assert read_command_line(["--config", recipe.file]).notices == ()
    command = [sys.executable, "real_model_example.py", "--config", recipe.file, "--print_config"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    from_file = {
        line.partition(":")[0]
        for line in done.stdout.splitlines()
        if line.partition("  # ")[2].startswith(recipe.file)
    }
    assert from_file == recipe.values.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_gpus_that_it_names(main_of, name):
    """The plan of the comment also has the memory and the time that the comment states."""
    recipe = read(name)
    assert recipe.plan[:2] == ["python", "scripts/plan_memory.py"]
    flags = dict(zip(recipe.plan[2::2], recipe.plan[3::2], strict=True))
    assert flags["--config"] == recipe.file
    assert f"{flags['--gpu_memory']} GB" in recipe.comment.replace(recipe.about["Plan"], "")
    done = main_of("plan_memory", *recipe.plan[2:], "--json")
    assert done.code == 0, done.out + done.err
    plan = json.loads(done.out)
    strategy = plan["recommended"]
    assert plan["config"] == {"file": recipe.file, "strategy": strategy, "fits": True}
    [need] = [need for need in plan["strategies"] if need["strategy"] == strategy]
    stated = re.findall(r"([\d.]+) GB(?! or more)", recipe.about["Memory"])
    places = ("peak_bytes", "host_bytes") if strategy == "offload" else ("peak_bytes",)
    assert stated == [f"{need[place] / GB:.1f}" for place in places]
    assert human_time(3600 * plan["cost"]["hours"]) in recipe.about["Time"]


# ------------------------------------------------------------------------------------------- runs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen(folder):
    """Save a small Qwen2 with ChatML's tokens and template."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer, end = ByteLevelBPETokenizer(), "<|im_end|>"
    special = ["<|endoftext|>", "<|im_start|>", end]
    text = ["How many legs does an ant have? It has six."]
    tokenizer.train_from_iterator(text, vocab_size=300, special_tokens=special)
    options = {"eos_token": end, "pad_token": special[0], "chat_template": CHATML}
    options["additional_special_tokens"] = special[1:2]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **options)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"vocab_size": 300, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
        **{"bos_token_id": 0, "eos_token_id": 2},
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_chats(folder, **rows):
    """Save a dataset of conversations, with this many rows in each split."""
    folder.mkdir(parents=True)
    files = ""
    for split, number in rows.items():
        files += f"  - split: {split}\n    path: {split}.jsonl\n"
        with open(folder / f"{split}.jsonl", "w") as file:
            for i in range(number):
                question = {"role": "user", "content": f"How many legs do {i} ants have?"}
                answer = {"role": "assistant", "content": f"They have {6 * i} legs. " * (i % 5 + 1)}
                file.write(json.dumps({"source": "ants", "messages": [question, answer]}) + "\n")
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n"
    )


@pytest.fixture(scope="module")
def recipes_hub(tmp_path_factory):
    """A stand-in for the hub that has what the recipes name; yields the environment of a run."""
    root = tmp_path_factory.mktemp("recipes_hub")
    for name in (GPT2, f"{GPT2}-xl"):
        (root / "models" / name).mkdir(parents=True)
        write_gpt2(root / "models" / name)
    names = "Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-7B meta-llama/Llama-2-13b-hf"
    for name in names.split():
        (root / "models" / name).mkdir(parents=True)
        write_qwen(root / "models" / name)
    write_wikitext(root / "datasets" / WIKITEXT, "wikitext-103-raw-v1")
    write_chats(root / "datasets" / "trl-lib/Capybara", train=400, test=20)
    write_chats(
        root / "datasets" / "HuggingFaceH4/ultrachat_200k", train_sft=80, test_sft=20, train_gen=1
    )
    with serving(root) as hub:
        yield {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path_factory.mktemp("hf")}


@pytest.mark.parametrize(
    "name, flags, under",
    [
        slow("chat_lora.yaml", [], {}),
        slow("gpt2.yaml", [], {}),
        # The model's size without weights, on text of the hub's other configuration.
        slow("gpt2_from_scratch.yaml", ["--batch_size", "1", "--no_export"], {}),
        slow("gpt2_xl_offload.yaml", [], {}),
        slow("gpt2_xl_zero3.yaml", [], TWO),
        slow("own_text.yaml", [], {}),
        slow("qlora_13b_2x24.yaml", [], TWO),
        slow("qlora_7b.yaml", [], {}),
        slow("slurm_7b.yaml", [], TWO),
    ],
)
def test_a_recipe_trains_a_small_model(script, recipes_hub, name, flags, under):
    recipe = read(name)
    if recipe.values.get("load_in_4bit") and importlib.util.find_spec("bitsandbytes") is None:
        skip("needs bitsandbytes: pip install bitsandbytes")
    small = "--max_steps 2 --seq_length 64 --eval_samples 4 --precision fp32".split()
    run = script("--config", recipe.file, *small, *flags, env=recipes_hub, **under)
    assert (run.results["status"], run.results["steps"]) == ("completed", 2)
    assert run.results["strategy"] == recipe.values["strategy"]
    assert run.results["model"] == recipe.values["model"]


def test_each_recipe_is_run():
    [mark] = (m for m in test_a_recipe_trains_a_small_model.pytestmark if m.name == "parametrize")
    assert sorted(case.values[0] for case in mark.args[1]) == RECIPES
