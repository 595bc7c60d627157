"""What the script refuses before it imports torch."""

from pathlib import Path

from attacks import Attack, table


def cached(*files: str, says: str) -> Attack:
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

    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"}
    return Attack(f"in the cache: {files}", prepare=prepare, env=env, says=says)


@table(
    Attack(
        "config.json not JSON",
        says="line 1",
        prepare=lambda folder: (folder / "config.json").write_text("{") and ["--model", folder],
    ),
    cached("config.json", "model.safetensors", says="no tokenizer files of some/model.*--prefetch"),
    Attack(
        "nothing in the cache",
        args=("--model", "gpt2", "--dataset", "wikitext"),
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": "hf"},
        says="no dataset Salesforce/wikitext and no model gpt2.*--prefetch",
    ),
    Attack(
        "--output_dir in a file",
        prepare=lambda folder: (
            (folder / "x").write_text("") or ["--output_dir", folder / "x" / "y"]
        ),
        says="is a file or a broken link",
    ),
    Attack(
        "an export over the user's files",
        says="is not empty",
        prepare=lambda folder: (folder / "mine").write_text("x") and ["--export_hf", folder],
    ),
    Attack(
        "an export over the run",
        says="would replace",
        prepare=lambda folder: ["--output_dir", folder / "a", "--export_hf", folder],
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
