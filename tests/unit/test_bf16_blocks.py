"""--bf16_blocks: the blocks compute in bf16, and all that is outside of them is as before."""

import contextlib
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from distributed_training.cli.parse import read_command_line
from distributed_training.errors import UserError
from distributed_training.model_parts import transformer_blocks
from distributed_training.ranks.process_group import configure_torch
from distributed_training.strategies.ddp.bf16_blocks import compute_in_bf16

BF16 = torch.bfloat16
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0}
SIZES["num_key_value_heads"] = 2
FAMILIES = ("gpt2", "llama", "qwen2", "gpt_neox", "opt", "bloom", "mixtral")


def model_of(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
    return AutoModelForCausalLM.from_config(config).train()


def loss_of(model, seed=0):
    torch.manual_seed(seed)
    tokens = torch.randint(1, 96, (2, 16))
    with torch.autocast("cpu", BF16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def converted(model):
    """The same with blocks whose parameters are in bf16, as other strategies store them."""
    model = copy.deepcopy(model)
    for block in transformer_blocks(model):
        block.to(BF16)
        forward = block.forward

        def in_bf16(*args, forward=forward, **options):
            as_bf16 = lambda t: t.to(BF16) if torch.is_tensor(t) and t.is_floating_point() else t  # noqa: E731
            args = [as_bf16(value) for value in args]
            for name, value in options.items():
                is_pair = isinstance(value, tuple)
                options[name] = tuple(map(as_bf16, value)) if is_pair else as_bf16(value)
            with torch.autocast("cpu", enabled=False):
                return forward(*args, **options)

        block.forward = in_bf16
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_blocks_in_bf16(family):
    model = model_of(family)
    expected = converted(model)
    compute_in_bf16(model)
    loss, wanted = loss_of(model), loss_of(expected)
    loss.backward()
    wanted.backward()
    assert torch.equal(loss, wanted)
    found, others = gradients_of(model), gradients_of(expected)
    assert found.keys() == others.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32, name
        assert torch.equal(gradient, others[name].float()), name


def test_the_parameters_stay_in_fp32_and_gradients_add_up_in_fp32():
    model = model_of("gpt2")
    before = dict(model.named_parameters())
    compute_in_bf16(model)
    sums = {}
    for seed in (1, 2, 3):  # three micro-batches
        alone = copy.deepcopy(model)
        for block in transformer_blocks(alone):
            del block.forward  # that of the original
        compute_in_bf16(alone)
        loss_of(alone, seed).backward()
        for name, gradient in gradients_of(alone).items():
            sums[name] = sums[name] + gradient if name in sums else gradient
        loss_of(model, seed).backward()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert {p.dtype for p in before.values()} == {torch.float32}
    found = gradients_of(model)
    assert sums.keys() == found.keys()
    assert all(torch.equal(found[name], total) for name, total in sums.items())


def test_autocast_is_disabled_in_the_blocks_only():
    """On CUDA it would convert the inputs of norms to fp32."""
    model, seen = model_of("gpt2"), {}
    for module in (transformer_blocks(model)[0].mlp, model.lm_head):
        module.register_forward_pre_hook(
            lambda module, _: seen.update({module: torch.is_autocast_enabled("cpu")})
        )
    compute_in_bf16(model)
    loss_of(model)
    assert [*seen.values()] == [False, True]


def test_a_block_that_fails_has_its_parameters_again():
    model = model_of("gpt2")
    before = dict(model.named_parameters())
    transformer_blocks(model)[1].mlp.forward = lambda hidden: 1 / 0
    compute_in_bf16(model)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    assert all(p is before[name] for name, p in model.named_parameters())


def test_parameters_without_a_gradient_keep_none():
    model = model_of("gpt2")
    block = transformer_blocks(model)[0]
    block.attn.c_attn.bias.requires_grad_(False)
    block.unused = torch.nn.Parameter(torch.ones(3))
    compute_in_bf16(model)
    loss_of(model).backward()
    assert block.attn.c_attn.bias.grad is None and block.unused.grad is None
    assert block.attn.c_attn.weight.grad is not None


class Kernels(TorchDispatchMode):
    """Counts the operators that compute something, each of which launches a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        makes_view = any(
            r.alias_info and not r.alias_info.is_write for r in operator._schema.returns
        )
        only_allocates = operator._schema.name.startswith("aten::empty")
        self.count += not (makes_view or only_allocates)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("strategy", ["dp", "zero1", "fsdp"])
def test_other_strategies_say_that_they_ignore_it(strategy):
    line = read_command_line(["--strategy", strategy, "--bf16_blocks"])
    assert any("--bf16_blocks" in notice for notice in line.notices) == (strategy != "dp")


@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp"])
def test_only_dp_refuses_it_in_fp32(strategy):
    settings = read_command_line(f"--strategy {strategy} --bf16_blocks --precision fp32".split())
    chosen, cpu = settings.settings, torch.device("cpu")
    refused = pytest.raises(UserError, match="--bf16_blocks needs bf16, and the run uses fp32")
    with refused if strategy == "dp" else contextlib.nullcontext():
        configure_torch(cpu, chosen.strategy, chosen.training, chosen.model)


@pytest.mark.parametrize("flags", ["--gradient_checkpointing", "--lora_r 4", "--eval_only"])
def test_what_it_excludes(flags):
    with pytest.raises(UserError, match="--bf16_blocks"):
        read_command_line(["--bf16_blocks", *flags.split()])


def test_fewer_kernels_are_launched_than_with_autocast():
    model = model_of("gpt2")

    def count():
        with Kernels() as kernels:
            loss_of(model).backward()
        return kernels.count

    count()  # the first one has no gradients to add to
    with_autocast = count()
    compute_in_bf16(model)
    assert count() < 0.9 * with_autocast
