"""What the script refuses before it imports torch."""

import json
import os
from pathlib import Path

from attacks import Attack, table
from command_lines import DEEP, DIGITS, GPT2_FILE


def model_folder(name: str, content: str | dict, says: str, file: str = "config.json") -> Attack:
    def prepare(folder: Path) -> list:
        (folder / "config.json").write_text(json.dumps(GPT2_FILE))
        (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
        return ["--model", folder, "--dataset", "pydocs"]

    return Attack(name, prepare=prepare, says=says)


def cached(*files: str) -> dict:
    """How another program may have left a model in the hub's cache."""

    def prepare(folder: Path) -> list:
        snapshot = folder / "hf" / "hub" / "models--some--model" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text("abc")
        for file in files:
            (snapshot / file).write_text("{}")
        (snapshot / "model-00002.safetensors").symlink_to("../../blobs/gone")
        return ["--model", "some/model", "--dataset", "pydocs"]

    return {"prepare": prepare, "env": {"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"}}


def with_tensorboard(path: str) -> list[str]:
    return ["--report_to", "tensorboard"] if path == "--logging_dir" else []


@table(
    model_folder("config.json nested", '{"a":' * DEEP, "nested"),
    model_folder("config.json with digits", f'{{"n_embd": {DIGITS}}}', "digits"),
    model_folder("config.json a list", "[]", "object"),
    model_folder("config.json not JSON", "{", "line 1"),
    model_folder("config.json not finite", json.dumps({**GPT2_FILE, "n_embd": 1e999}), "n_embd"),
    model_folder("a text as vocabulary", {**GPT2_FILE, "vocab_size": "many"}, "vocab_size"),
    model_folder("negative positions", {**GPT2_FILE, "n_positions": -1}, "n_positions"),
    Attack(
        "config.json a folder",
        says="cannot be read|no config.json",
        prepare=lambda folder: (folder / "config.json").mkdir() or ["--model", folder],
    ),
    Attack(
        "weights without a tokenizer in the cache",
        says="no tokenizer files of some/model.*--prefetch --model some/model",
        **cached("config.json", "model.safetensors"),
    ),
    Attack(
        "only a tokenizer's configuration",
        says="no tokenizer files",
        **cached("config.json", "tokenizer_config.json", "model.safetensors"),
    ),
    Attack(
        "a tokenizer without weights in the cache",
        says="no weights of some/model.*--prefetch",
        **cached("config.json", "tokenizer.json"),
    ),
    Attack(
        "neither",
        says="no config.json and no tokenizer files and no weights",
        **cached("README.md"),
    ),
    Attack(
        "nothing in the cache",
        args=("--model", "gpt2", "--dataset", "wikitext"),
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"},
        says="--prefetch --model gpt2 --dataset wikitext",
    ),
    Attack(
        "a rank that is no number",
        env={"RANK": "x", "WORLD_SIZE": "2"},
        says="environment is incomplete",
    ),
    Attack(
        "a world of many digits",
        env={"RANK": "0", "WORLD_SIZE": DIGITS},
        says="environment is incomplete",
    ),
    Attack(
        "Slurm's rank no number",
        says="environment is incomplete",
        env={"SLURM_PROCID": "x", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
    ),
    Attack(
        "an endpoint that is a file",
        args=("--model", "gpt2"),
        env={"HF_ENDPOINT": "file:///etc/passwd", "HF_HOME": "hf"},
        says="cannot be reached",
    ),
    Attack(
        "an endpoint that is no address",
        args=("--model", "gpt2"),
        env={"HF_ENDPOINT": "http://[::1", "HF_HOME": "hf"},
        says="cannot be reached",
    ),
    Attack(
        "HF_HOME is a file",
        args=("--model", "gpt2"),
        env={"HF_HOME": "file", "HF_HUB_OFFLINE": "1"},
        says="not in the cache",
        prepare=lambda folder: (folder / "file").write_text("") and None,
    ),
    Attack(
        "Python's own encoding is ASCII",
        args=("--strategy", "ä"),
        env={"PYTHONIOENCODING": "ascii"},
    ),
    Attack(
        "a locale without UTF-8",
        args=("--model", "ä€"),
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ),
    *[
        Attack(
            f"{path} under a file",
            prepare=lambda folder, path=path: (
                (folder / "file").write_text("")
                or [path, folder / "file" / "x", *with_tensorboard(path)]
            ),
            says="is a file",
        )
        for path in ("--output_dir", "--export_hf", "--logging_dir")
    ],
    *[
        Attack(
            f"{path} a link to itself",
            prepare=lambda folder, path=path: (
                (folder / "l").symlink_to("l")
                or [path, folder / "l" / "x", *with_tensorboard(path)]
            ),
            says="a link to nothing, or to itself",
        )
        for path in ("--output_dir", "--export_hf", "--logging_dir")
    ],
    Attack(
        "a template that never ends",
        args=("--chat_template", "/dev/zero"),
        says="not an ordinary file",
    ),
    Attack(
        "a template that is a pipe",
        says="not an ordinary file",
        prepare=lambda folder: os.mkfifo(folder / "p") or ["--chat_template", folder / "p"],
    ),
    Attack(
        "a run file that is a pipe",
        says="not an ordinary file",
        prepare=lambda folder: os.mkfifo(folder / "p") or ["--config", folder / "p"],
    ),
    Attack(
        "a pipe as earlier results",
        says="holds another run",
        prepare=lambda folder: os.mkfifo(folder / "results.json") or ["--output_dir", folder],
    ),
    Attack(
        "nested earlier results",
        says="holds another run",
        prepare=lambda folder: (
            (folder / "results.json").write_text('{"a":' * DEEP) and ["--output_dir", folder]
        ),
    ),
    Attack(
        "--prefetch on two ranks",
        args=("--prefetch",),
        env={"RANK": "0", "WORLD_SIZE": "2"},
        says="one process",
    ),
    Attack("--prefetch and --check", args=("--prefetch", "--check"), says="cannot both"),
    Attack(
        "--logging_dir of another run",
        args=("--report_to", "tensorboard"),
        says="curves of another run",
        prepare=lambda folder: (
            (folder / "events.out.tfevents.1.x").write_text("") or ["--logging_dir", folder]
        ),
    ),
)
def test_refused_before_torch_is_imported(attack, script, tmp_path):
    args = [*attack.args, *(attack.prepare(tmp_path) or [])]
    env = {
        name: tmp_path / value if name == "HF_HOME" else value for name, value in attack.env.items()
    }
    run = script(*args, env=env, ok=False, timeout=60, real=True)
    attack.check(tmp_path, run)
    assert "import torch" not in run.err and run.seconds < 5
