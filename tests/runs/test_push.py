"""--push_to_hub: the exported model on a stand-in for the hub, and what is refused before training."""

import pytest
from local_hub import TOKEN

pytestmark = pytest.mark.slow

WORK = ["--max_steps", "2", "--seq_length", "32", "--no_eval", "--save_every", "2", "--push_to_hub"]


def test_the_export_is_pushed(script, hub, tmp_path):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf", "HF_TOKEN": TOKEN}
    run = script(*WORK, "--hub_model_id", "mine", env=env)
    [(repository, files)] = hub.pushed.items()
    exported = {file.name: file.read_bytes() for file in (run.folder / "hf").iterdir()}
    assert repository == "somebody/mine" and len(exported) > 4
    assert files == exported
    assert run.results["push"]["repository"] == repository
    written = [file.read_bytes() for file in run.folder.rglob("*") if file.is_file()]
    assert TOKEN not in run.out + run.err
    assert not any(TOKEN.encode() in content for content in written)
    # A completed run pushes the export that it has.
    script(*WORK, "--hub_model_id", "club/again", "--resume", env=env, folder=run.folder)
    assert hub.pushed["club/again"] == exported


@pytest.mark.parametrize(
    "env, said",
    [({"HF_TOKEN": "hf_" + "wrong" * 8}, "HF_TOKEN"), ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE")],
)
def test_a_push_that_cannot_work_ends_before_the_training(script, hub, tmp_path, env, said):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf", **env}
    run = script(*WORK, env=env, ok=False)
    assert run.code == 2 and "--push_to_hub" in run.error and said in run.error
    assert "wrongwrong" not in run.out + run.err and not hub.pushed
    assert not (run.folder / "metrics.jsonl").exists()
