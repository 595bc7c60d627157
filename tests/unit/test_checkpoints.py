"""Checkpoints of a model of one layer, saved and loaded in this process."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from one_rank import one_rank
from safetensors import safe_open

from distributed_training.checkpoints import loading
from distributed_training.checkpoints.format import kinds_entry, kinds_of
from distributed_training.checkpoints.loading import PieceReader, read_shards
from distributed_training.checkpoints.saving import PieceWriter, write_shards
from distributed_training.optimizers import OPTIMIZERS, moments_8bit
from distributed_training.strategies import gradients
from distributed_training.strategies.table import STRATEGIES

CPU = torch.device("cpu")


@pytest.fixture
def ctx():
    with one_rank() as context:
        yield context


def updated(create, inputs=80, outputs=64) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    """A layer after one update; by default large enough for 8-bit moments of its matrix."""
    torch.manual_seed(0)
    model = torch.nn.Linear(inputs, outputs)
    optimizer = create(model.parameters())
    model(torch.randn(4, inputs)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("elements", [1, 6, 100])
def test_pieces_are_distributed_over_files(ctx, tmp_path, monkeypatch, elements):
    """Each file has at most `elements` elements, and any distribution is read as the same tensors."""
    monkeypatch.setattr("distributed_training.checkpoints.saving.PIECE_FILE_BYTES", 12 * elements)
    model, optimizer = updated(torch.optim.AdamW, 3, 2)
    state, writer = STRATEGIES["dp"].states_of(model, optimizer, CPU), PieceWriter(tmp_path)
    write_shards(writer, state, 1)
    assert len(writer.files) == -(-8 // elements)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    read_shards(tmp_path, {"pieces": writer.pieces, "adam_step": 1}, state)
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


def test_a_file_that_was_read_does_not_stay_in_the_memory_of_the_process(
    ctx, tmp_path, monkeypatch
):
    """What was read of a mapped file counts as memory; opening it for each tensor takes time."""
    model, optimizer = updated(torch.optim.AdamW)
    state, writer = STRATEGIES["dp"].states_of(model, optimizer, CPU), PieceWriter(tmp_path)
    write_shards(writer, state, 1)
    opened = []
    opening = lambda *args, **options: opened.append(1) or safe_open(*args, **options)  # noqa: E731
    monkeypatch.setattr(loading, "safe_open", opening)
    for limit, times in ((1 << 20, 1), (4 * 80 * 64, 3)):
        monkeypatch.setattr(loading, "MAPPED_BYTES", limit)
        reader = PieceReader(tmp_path, {"pieces": writer.pieces})
        opened.clear()
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            reader.read_into(torch.empty(80 * 64), "weight", kind, 0)
        assert len(opened) == times
        reader.close()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_8bit_moments_are_the_same_after_a_save_and_a_load(ctx, tmp_path, monkeypatch):
    """Blocks begin at the same elements, so every code is found again."""
    bnb = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(moments_8bit, "PART", 2 * moments_8bit.BLOCK)
    (first, optimizer), (second, fresh) = (updated(bnb.optim.AdamW8bit) for _ in range(2))
    writer = PieceWriter(tmp_path)
    write_shards(writer, STRATEGIES["dp"].states_of(first, optimizer, CPU), 1)
    fresh.state.clear()
    state = STRATEGIES["dp"].states_of(second, fresh, CPU)
    read_shards(tmp_path, {"pieces": writer.pieces, "adam_step": 1}, state)
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        found, expected = fresh.state[mine], optimizer.state[theirs]
        assert found.keys() == expected.keys() and found["step"] == 1
        assert all(torch.equal(found[kind], expected[kind]) for kind in ("state1", "state2"))
    assert fresh.state[second.weight]["state1"].dtype == torch.uint8


class KeptWhole:
    """A parameter that every rank of ZeRO-3 keeps whole; as in DeepSpeed, only one that is
    partitioned is gathered again.
    """

    def __init__(self, master):
        self.master, self.whole = master, master.detach().clone()

    def partition(self, parameters):
        for parameter in parameters:
            parameter.whole = None

    def all_gather(self, parameters):
        for parameter in parameters:
            if parameter.whole is None:
                parameter.whole = parameter.master.detach().clone()


def test_parameters_that_zero3_keeps_whole_are_gathered_again_after_a_load(ctx):
    master = torch.nn.Parameter(torch.zeros(4))
    wrapper = SimpleNamespace(  # what ShardedState uses of DeepSpeed's optimizer
        optimizer=torch.optim.AdamW([master]),
        fp32_partitioned_groups_flat=[master],
        fp16_groups=[[]],
        persistent_parameters=[KeptWhole(master), KeptWhole(master)],
        _swappable_optimizer_subgroup=lambda group: False,
        _reassign_or_swap_out_partitioned_parameters=lambda group: None,
    )
    state = STRATEGIES["zero3"].states_of(torch.nn.Module(), wrapper, CPU)
    with state.open(state.shards[0], write=True) as tensors:
        tensors["weight"].fill_(7.0)
    state.finish_writing()
    assert all(parameter.whole.tolist() == [7.0] * 4 for parameter in wrapper.persistent_parameters)


def test_loss_scaler_of_pytorch():
    """fp16 needs a GPU; restoring the scaler's state does not."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    first, second = (
        torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)
    )
    for factor in (1.0, float("inf"), 1.0, 1.0):  # one step overflows
        first.scale(weight.sum() * factor).backward()
        first.step(optimizer)
        first.update()
        optimizer.zero_grad()
    saved = json.loads(json.dumps(gradients.scaler_state(first, optimizer)))
    assert saved["scale"] == 512.0 and saved["_growth_tracker"] == 2
    gradients.load_scaler_state(saved, second, optimizer)
    assert second.state_dict() == saved
    gradients.load_scaler_state({"cur_scale": 64.0}, second, optimizer)  # of DeepSpeed's
    assert second.get_scale() == 64.0


@pytest.mark.parametrize(
    "states, entry",
    [
        ((), {"moments": False}),
        (("exp_avg", "exp_avg_sq"), {"moments": True}),
        (("momentum_buffer",), {"moments": False, "momentum": True}),
        (("exp_avg",), {"moments": False, "kinds": ["exp_avg"]}),
        (("exp_avg", "exp_inf"), {"moments": False, "kinds": ["exp_avg", "exp_inf"]}),
    ],
)
def test_kinds_of_a_piece_are_those_that_were_saved(states, entry):
    """The first three entries are those of earlier versions."""
    kinds = ("weight", *states)
    assert kinds_entry(kinds) == entry and kinds_of(entry) == kinds


def test_the_optimizers_are_a_mapping():
    assert "muon" in OPTIMIZERS and "moments_8bit" not in OPTIMIZERS
    assert OPTIMIZERS.get("lion") is None and OPTIMIZERS["muon"] is OPTIMIZERS["muon"]
