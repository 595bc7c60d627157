"""The repository of --push_to_hub."""

import threading
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
from local_hub import TOKEN, Hub

from distributed_training.errors import UserError
from distributed_training.model import push
from distributed_training.settings.output import OutputSettings


@pytest.fixture
def empty_hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    threading.Thread(target=hub.serve_forever, args=[0.02], daemon=True).start()
    api = partial(huggingface_hub.HfApi, endpoint=hub.url, token=TOKEN)
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    yield hub
    hub.shutdown()
    hub.server_close()


def opened(name: str, private: bool, folder) -> str | None:
    output = OutputSettings(push_to_hub=True, hub_model_id=name, hub_private_repo=private)
    return push.open_repository(output, folder, SimpleNamespace(is_main=True))


def test_a_repository_that_may_only_be_read_is_refused_before_the_training(empty_hub, tmp_path):
    assert opened("mine", False, tmp_path) == "somebody/mine"
    empty_hub.read_only.add("somebody/mine")
    with pytest.raises(UserError, match=r"--push_to_hub failed.*may write to mine"):
        opened("mine", False, tmp_path)
    assert not empty_hub.pushed["somebody/mine"]


def test_a_private_push_never_goes_to_a_public_repository(empty_hub, tmp_path):
    assert opened("mine", True, tmp_path) == opened("mine", False, tmp_path) == "somebody/mine"
    assert empty_hub.private == {"somebody/mine"}
    assert opened("mine", True, tmp_path) == "somebody/mine"  # exists, and is private
    assert opened("all", False, tmp_path) == "somebody/all"
    with pytest.raises(UserError, match=r"somebody/all exists and is public") as refused:
        opened("all", True, tmp_path)
    assert "Log in" not in str(refused.value)
