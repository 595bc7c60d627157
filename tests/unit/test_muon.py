"""--optim muon: Muon for the matrices of the blocks, AdamW for the other parameters."""

import copy
import json
import os
import subprocess

import pytest
import torch
from conftest import PROJECT, free_port
from one_rank import one_rank
from small_models import CONFIGS
from transformers import AutoModelForCausalLM

from distributed_training.checkpoints.loading import read_shards
from distributed_training.checkpoints.saving import PieceWriter, write_shards
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import UserError
from distributed_training.model_parts import transformer_blocks
from distributed_training.optimizers import muon_and_adamw as muon
from distributed_training.optimizers.muon import separate_matrices
from distributed_training.strategies.table import STRATEGIES
from real_model_example import create_optimizer, parameter_groups

TRAINING = parse_arguments("--optim muon --lr 1e-2 --weight_decay 0.1".split()).training
CPU = torch.device("cpu")
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


def new_model(family="gpt2"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family])


def train(model, *optimizers, steps=3):
    for step in range(steps):
        torch.manual_seed(step)
        model(inputs := torch.randint(50, (2, 12)), labels=inputs).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return model


def optimizer_of(model):
    return create_optimizer(parameter_groups(model, TRAINING), model, TRAINING)


def groups_of(model):
    return separate_matrices(parameter_groups(model, TRAINING), transformer_blocks(model))


@pytest.mark.parametrize("family", CONFIGS)
def test_the_matrices_of_the_blocks_are_those_of_muon(family):
    model = new_model(family)
    groups = groups_of(model)
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for p in groups[0]["params"]}
    assert of_muon == {
        n for n, p in model.named_parameters() if ".0." in n or ".1." in n if p.dim() == 2
    }
    assert len(of_muon) == 2 * {"gpt2": 4, "llama": 7}[family]
    assert sum(len(group["params"]) for group in groups) == len(names)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


@needs_muon
def test_updates_are_those_of_torch(monkeypatch):
    """torch's two optimizers, each with its own parameters, for the same gradients."""
    monkeypatch.setattr(muon, "computes_bf16", lambda device: True)
    ours = new_model()
    theirs, start = copy.deepcopy(ours), copy.deepcopy(ours)
    matrices, *others = groups_of(theirs)
    del matrices["momentum"]
    scale = {"lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"}
    apart = [torch.optim.Muon([matrices], **scale), torch.optim.AdamW(others, lr=1e-2)]
    optimizers = {ours: [optimizer_of(ours)], theirs: apart}
    for step in range(3):
        for model, own in optimizers.items():
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            for optimizer in own:
                optimizer.step()
    first = dict(start.named_parameters())
    for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, expected, atol=1e-6) and not torch.equal(mine, first[name])


@needs_muon
@pytest.mark.parametrize("shape", [(96, 32), (32, 96)])
def test_iterations_in_fp32_are_those_of_torch_in_fp32(monkeypatch, shape):
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.zeros(shape))
    theirs.grad = momentum = torch.randn(shape)
    options = {"momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, **options)
    update = muon.update_of(momentum.clone(), 0.01, torch.float32)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's, in fp32
    optimizer.step()
    assert update.dtype == torch.float32
    assert torch.allclose(update, theirs, rtol=1e-5, atol=1e-5 * update.abs().max().item())


def test_all_ranks_iterate_in_fp32_if_one_only_emulates_bf16(monkeypatch):
    """Else the copies of the weights would differ."""
    parameter, others = torch.ones(2, 2), torch.tensor(0)
    monkeypatch.setattr(muon, "computes_bf16", lambda device: True)
    assert muon.common_dtype(parameter) == torch.bfloat16
    with one_rank():
        assert muon.common_dtype(parameter) == torch.bfloat16
        monkeypatch.setattr(muon.dist, "all_reduce", lambda own, op: own.copy_(others))
        assert muon.common_dtype(parameter) == torch.float32


def test_updates_from_shards_are_those_of_one_process_for_gradients_of_low_rank():
    """As of a batch with few tokens. The update amplifies the rounding of the small singular values.

    torch.optim.Muon of torch 2.13.0 normalizes by a norm in bf16 of each rank's rows.
    """
    port = f"--master_port={free_port()}"
    command = ["torchrun", "--nproc_per_node=2", port, "-m", "tests.helpers.low_rank_muon"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, env=env)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 6 and max(differences) < 1e-5


def test_a_transposed_matrix_has_the_transposed_update():
    """As GPT-2's layers store their weights. The mean square is that of AdamW's updates."""
    torch.manual_seed(0)
    momentum = torch.randn(96, 32)
    update = muon.update_of(momentum, 0.01, torch.bfloat16)
    transposed = muon.update_of(momentum.T.contiguous(), 0.01, torch.bfloat16)
    assert torch.allclose(transposed.T, update, atol=1e-4)
    assert update.square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.2)


def test_states_are_the_same_after_a_save_and_a_load(tmp_path):
    """A matrix of a block has one average, the others have two moments."""
    first = new_model()
    train(first, optimizer := optimizer_of(first))
    with one_rank():
        state, writer = STRATEGIES["dp"].states_of(first, optimizer, CPU), PieceWriter(tmp_path)
        write_shards(writer, state, 1)
        with torch.random.fork_rng():
            second = AutoModelForCausalLM.from_config(CONFIGS["gpt2"])
        fresh = optimizer_of(second)
        loaded = STRATEGIES["dp"].states_of(second, fresh, CPU)
        read_shards(tmp_path, {"pieces": writer.pieces, "adam_step": state.adam_step}, loaded)
    assert state.optimizer.name == "muon" and state.adam_step == 3
    for (name, mine), other in zip(second.named_parameters(), first.parameters(), strict=True):
        found, expected = fresh.state[mine], optimizer.state[other]
        assert found.keys() == expected.keys(), name
        assert all(torch.equal(found[kind], expected[kind]) for kind in found), name
        assert ("momentum_buffer" in found) == (".h." in name and other.dim() == 2)
    for model, resumed in ((first, optimizer), (second, fresh)):
        train(model, resumed, steps=1)
    for mine, other in zip(second.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_parameters_that_zero3_has_emptied_are_those_of_muon():
    """DeepSpeed's own optimizer once gave all of them to AdamW (its issue 8438)."""
    model = new_model()
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    first, *_ = groups_of(model)
    assert "momentum" in first and len(first["params"]) == 2 * 4
    optimizer = optimizer_of(model)
    assert optimizer.elements == (2 * 12 * 32**2, (50 + 16) * 32 + (2 * 13 + 2) * 32)


def test_a_model_without_matrices_in_blocks_is_refused():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(UserError, match="would update no parameter"):
        optimizer_of(model)


def test_unequal_gpus_need_shards():
    """Under dp each of them computes the whole update, and would round it differently."""
    with pytest.raises(UserError, match="needs equal GPUs"):
        parse_arguments(["--optim", "muon", "--rank_shares", "2,1"])
    for strategy in ("fsdp", "zero2", "zero3"):
        assert parse_arguments(["--optim=muon", "--rank_shares=2,1", "--strategy", strategy])
