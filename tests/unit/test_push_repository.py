"""The repository of --push_to_hub, and the upload by rank 0 while the other ranks wait."""

import threading
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import pytest
from local_hub import TOKEN, Hub
from torch.distributed import HashStore

from support.cluster.context import DistContext
from support.errors import UserError
from support.model import push


@pytest.fixture
def empty_hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    api = partial(huggingface_hub.HfApi, endpoint=hub.url, token=TOKEN)
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    yield hub
    hub.shutdown()
    hub.server_close()


def opened(name: str, private: bool, folder) -> str | None:
    args = SimpleNamespace(push_to_hub=True, hub_model_id=name, hub_private_repo=private)
    return push.open_repository(args, folder, SimpleNamespace(is_main=True))


def test_a_private_push_never_goes_to_a_public_repository(empty_hub, tmp_path):
    assert opened("mine", True, tmp_path) == opened("mine", False, tmp_path) == "somebody/mine"
    assert empty_hub.private == {"somebody/mine"}
    assert opened("mine", True, tmp_path) == "somebody/mine"  # exists, and is private
    assert opened("all", False, tmp_path) == "somebody/all"
    with pytest.raises(UserError, match=r"somebody/all exists and is public") as refused:
        opened("all", True, tmp_path)
    assert "Log in" not in str(refused.value)


def test_other_ranks_wait_for_the_upload_without_a_collective(monkeypatch, tmp_path):
    """No process group exists here, so a collective would raise."""
    store, uploaded, results = HashStore(), threading.Event(), {}

    def upload(*_) -> dict:
        assert uploaded.wait(20)
        return {"commit": "ab"}

    def push_on(rank: int) -> None:
        launch = SimpleNamespace(node=0, is_node_leader=rank == 0)
        failures = SimpleNamespace(store=store)
        ctx = SimpleNamespace(launch=launch, nodes=1, real_world_size=2, failures=failures)
        ctx.once_per_node = partial(DistContext.once_per_node, ctx)
        results[rank] = push.push("a/b" if rank == 0 else None, tmp_path, ctx)

    monkeypatch.setattr(push, "_upload", upload)
    threads = [threading.Thread(target=push_on, args=(rank,), daemon=True) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    assert threads[0].is_alive() and not results
    uploaded.set()
    for thread in threads:
        thread.join(20)
    assert results == {0: {"commit": "ab"}, 1: {"commit": "ab"}}
