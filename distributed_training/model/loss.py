"""Next-token loss, computed from chunks of the logits.

The logits of a batch and what cross_entropy derives from them are the largest tensors of a step:
2.3 GB for GPT-2 and 4,096 tokens. A model that `add_loss` has changed returns the loss if it gets
targets: its output layer computes logits, loss and gradient of a few hundred tokens at a time.
compiled_loss.py has the output layer of --compile and --compile_loss.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from distributed_training import patches
from distributed_training.loss_chunks import number_of_chunks
from distributed_training.model.weights import NOT_WITH_FAKE_TENSORS, from_config
from distributed_training.strategies.wrapped import unwrapped

# The logits get columns of padding up to a multiple of this number, by device and bytes of an
# element, so that their rows are aligned: GPT-2's vocabulary of 50,257 is odd, which makes cuBLAS
# (in fp32 with TF32) and, on an AMD CPU, MKL slow.
ALIGNMENT = {("cuda", 2): 128, ("cuda", 4): 32, ("cpu", 4): 16}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # hidden, weight, bias


class Targets(NamedTuple):
    """What a loss is computed of, besides the logits."""

    tokens: torch.Tensor  # [tokens], the next token of each; negative: not counted
    divisor: torch.Tensor  # a scalar
    factor: torch.Tensor | None = None  # a scalar; the gradients are computed of loss × factor


class Computation(NamedTuple):
    """How a loss is computed."""

    dtype: torch.dtype  # of the matrix products
    cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # of a chunk


def computes_loss(model: nn.Module) -> bool:
    """Return whether a model, which may be wrapped, returns the loss if it gets targets."""
    return isinstance(unwrapped(model), LossMixin)


class LossMixin(nn.Module):
    """Forward method of a causal language model that returns the loss if it gets targets."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        **options: object,
    ):
        """Return the sum of the cross entropies / `tokens`; without `targets` the usual output.

        `targets` has the next token of each position, negative for those that do not count.
        `tokens` is an integer: FSDP's mixed precision would convert a float to bf16. `factor` is
        what the loss will be multiplied by before its backward pass; only fp16 needs it.
        """
        if targets is None:
            return super().forward(input_ids, **options)
        hidden = decoder_of(self)(input_ids, use_cache=False, **options)[0]
        head = self.get_output_embeddings()
        head.tokens = targets.numel()
        return head(hidden, targets, tokens, factor)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the targets' log-probabilities, and the logits' gradient in `dtype`.

    The gradient is the second result, [tokens, vocabulary], times the third, [tokens, 1]. Callers
    apply the factor to the smaller operand or result of a product.
    """
    log_p = F.log_softmax(logits, -1, dtype=torch.float32)
    valid = targets >= 0
    target = targets.where(valid, 0).unsqueeze(1)
    log_p_of_target = log_p.gather(1, target)
    summed = log_p_of_target.squeeze(1).where(valid, 0).sum()
    factor = (valid * scale).unsqueeze(1)
    if not with_gradient:
        return summed, logits, factor
    # The derivative with respect to the logits is p - 1 for the target and p for all others.
    # expm1 avoids cancellation where p is close to 1.
    of_target = log_p_of_target.expm1()
    if dtype == torch.float16:  # it cannot hold small probabilities before they are scaled
        derivative = log_p.exp_().scatter_(1, target, of_target).mul_(factor)
        return summed, derivative.to(dtype), torch.ones_like(factor)
    out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    return summed, torch.exp(log_p, out=out).scatter_(1, target, of_target.to(dtype)), factor


class OutputLayer(nn.Linear):
    """Output layer that returns the loss if it gets targets, and logits otherwise."""

    cross_entropy = staticmethod(cross_entropy)  # of a chunk
    kept_bytes: int = 0  # measured: bytes of the gradients that the last loss keeps until backward
    tokens: int = 0  # of the last micro-batch, with padding

    def forward(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute logits [batch, length, vocabulary], or the loss: a scalar in fp32."""
        if targets is None or tokens is None:
            return super().forward(hidden)
        return self._loss(hidden, Targets(targets.flatten(), tokens, factor))

    @torch.compiler.disable  # the loop over chunks records no graph, so compiling it gains nothing
    def _loss(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        device, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if dtype != torch.float16:
            targets = targets._replace(factor=None)
        inputs = (hidden.flatten(0, 1), self.weight, self.bias)
        # Profilers show the name "head"; benchmarks/gpu_tables.py sums the time of its kernels.
        with torch.autocast(device, enabled=False), torch.profiler.record_function("head"):
            how = Computation(dtype, self.cross_entropy)
            if not torch.is_grad_enabled():
                return _loss_and_gradients(inputs, targets, how, (False, False, False))[0]
            loss = ChunkedLoss.apply(*inputs, targets, how)
        if loss.requires_grad:
            saved = loss.grad_fn.saved_tensors
            self.kept_bytes = sum(tensor.nbytes for tensor in saved if tensor is not None)
        return loss


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal language model that is followed by the output layer."""
    # Not in all models of transformers 4.
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def add_loss(model: nn.Module, output_layer: type[OutputLayer] = OutputLayer) -> None:
    """Make a model that passes `returns_plain_logits` return the loss if it gets targets.

    This changes its class and that of its output layer: modules around them would change the names
    of the parameters.
    """
    cls = type(model)
    model.__class__ = type(cls.__name__, (LossMixin, cls), {"__module__": cls.__module__})
    model.get_output_embeddings().__class__ = output_layer


def returns_plain_logits(config: PretrainedConfig) -> bool:
    """Return whether a model's logits are the output layer's result for the decoder's output.

    Some models scale or cap their logits (Gemma 2, Cohere, Granite).
    """
    # fp32, because some models convert their logits to it. With fake tensors, which have no memory,
    # the grouped matrix multiplication of experts accepts bf16 only.
    has_experts = any("expert" in name for name in config.get_text_config().to_dict())
    with torch.no_grad(), FakeTensorMode(), patches.without_initialization():
        dtype = torch.bfloat16 if has_experts else torch.float32
        model = from_config(config, dtype).eval()  # dropout fails on fake CPU tensors
        head, decoder = model.get_output_embeddings(), decoder_of(model)
        if type(head) is not nn.Linear or decoder is None or decoder is model:
            return False
        seen = []
        decoder.register_forward_hook(lambda _m, _i, out: seen.append(_view(out[0])))
        head.register_forward_hook(lambda _m, args, out: seen.extend(map(_view, (args[0], out))))
        # Not token ids: some models compare them with the padding token, and need their values.
        hidden_size = model.get_input_embeddings().weight.shape[1]
        try:
            embedded = torch.zeros(1, 2, hidden_size, dtype=dtype)
            logits = model(inputs_embeds=embedded, use_cache=False).logits
        except NOT_WITH_FAKE_TENSORS:
            return False  # experts of transformers 4 read values, for example
    return len(seen) == 3 and seen[0] == seen[1] and seen[2] == _view(logits)


def _view(tensor: torch.Tensor) -> tuple:
    """Return what is equal for two tensors if they are the same values in the same memory."""
    place = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor.untyped_storage()._cdata, tensor._version, place


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer's output, summed over the tokens and divided by a number.

    The gradients are computed together with the loss, from the same logits; backward only
    multiplies them. In fp16 they would underflow without the factor of the loss scaler, so they are
    computed with it (`Targets.factor`).

    Inputs: hidden [tokens, hidden size], weight [vocabulary, hidden size], bias [vocabulary] or
    None, targets, Computation.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets: Targets, how: Computation) -> torch.Tensor:
        """Compute the loss and the gradients."""
        loss, gradients = _loss_and_gradients(
            (hidden, weight, bias), targets, how, ctx.needs_input_grad[:3]
        )
        ctx.save_for_backward(*gradients, targets.factor)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor):
        """Return the gradients of hidden, weight and bias, times the scalar `factor`."""
        *gradients, known = ctx.saved_tensors
        if known is not None:
            factor = factor / known
        return *(g if g is None else g.mul_(factor) for g in gradients), None, None


def _loss_and_gradients(
    inputs: Inputs,
    targets: Targets,
    how: Computation,
    needed: Sequence[bool],
    alignment: int | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss of all chunks, and the gradients of `inputs`, times the targets' factor.

    Args:
        inputs, targets, how: as in ChunkedLoss; sums over chunks are in fp32.
        needed: whether each of the inputs needs a gradient.
        alignment: the columns of the logits are padded to a multiple of it, and in 16 bits the rows
            of a chunk; None: that of ALIGNMENT, or 1.
    """
    device, vocabulary, dtype = inputs[0].device.type, len(inputs[1]), how.dtype
    if alignment is None:
        alignment = ALIGNMENT.get((device, dtype.itemsize), 1)
    padding = -vocabulary % alignment  # columns that no target names
    hidden, weight, bias = _as_factors(inputs, dtype, padding)
    gradients = ChunkedGradients(inputs, needed)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    scale = (1 if targets.factor is None else targets.factor) / targets.divisor
    rows = -(-len(hidden) // number_of_chunks(len(hidden), len(weight), device))
    rows += -rows % alignment if dtype.itemsize == 2 else 0
    for start in range(0, len(hidden), rows):
        count = min(rows, len(hidden) - start)
        part = hidden.narrow(0, start, count)
        logits = _logits(part, weight, bias, vocabulary + padding)
        if padding:
            logits.narrow(1, vocabulary, padding).fill_(-torch.inf)
        log_p, grad_logits, factor = how.cross_entropy(
            logits, targets.tokens.narrow(0, start, count), scale, dtype, any(needed)
        )
        grad_logits = grad_logits.narrow(1, 0, len(weight))
        loss -= log_p
        gradients.add(start, part, weight, grad_logits, factor)
        del logits, grad_logits  # before the next chunk allocates its own
    return loss * (1 / targets.divisor), gradients.of_inputs(inputs)


def _as_factors(inputs: Inputs, dtype: torch.dtype, padding: int) -> Inputs:
    """Return the inputs in the dtype of the matrix products; in 16 bits with rows of padding."""
    hidden, weight = inputs[0].to(dtype), inputs[1].to(dtype)
    bias = None if inputs[2] is None else inputs[2].to(dtype)
    if padding and dtype.itemsize == 2:  # in fp32 the copy would cost as much memory as the weight
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = bias if bias is None else F.pad(bias, (0, padding))
    return hidden, weight, bias


class ChunkedGradients:
    """Gradients of the inputs that need one; those of weight and bias are sums over the chunks."""

    def __init__(self, inputs: Inputs, needed: Sequence[bool]):
        hidden, weight, _ = inputs
        fp32 = {"dtype": torch.float32, "device": hidden.device}
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros(weight.shape, **fp32) if needed[1] else None
        self.bias = torch.zeros(len(weight), **fp32) if needed[2] else None

    def add(
        self,
        start: int,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        grad_logits: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        """Add those of a chunk.

        Args:
            start: the chunk's first token.
            hidden, weight: the factors of its logits; the weight may have rows of padding.
            grad_logits, factor: whose product is the gradient of the logits, see `cross_entropy`.
        """
        if self.hidden is not None:
            of_chunk = self.hidden.narrow(0, start, len(hidden))
            of_chunk.copy_((grad_logits @ weight).mul(factor))
        if self.weight is not None:
            hidden = hidden.mul(factor).to(hidden.dtype)
            if hidden.dtype == torch.float32:
                self.weight.addmm_(grad_logits.T, hidden)
            else:
                self.weight += (grad_logits.T @ hidden).narrow(0, 0, len(self.weight))
        if self.bias is not None:
            product = (grad_logits.T @ factor.to(hidden.dtype)).squeeze(1)
            self.bias += product.narrow(0, 0, len(self.bias))

    def of_inputs(self, inputs: Inputs) -> list[torch.Tensor | None]:
        """Return the gradients in the dtypes of the inputs; None for one that needs none."""
        return [
            None if g is None or x is None else g.to(x.dtype)
            for g, x in zip((self.hidden, self.weight, self.bias), inputs, strict=True)
        ]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: int
) -> torch.Tensor:
    """Compute the logits of a chunk, [tokens, columns]: in fp32 if possible, else as the inputs.

    log_softmax would convert 16-bit logits.
    """
    if columns > len(weight):
        logits = hidden.new_empty(len(hidden), columns)
        product = torch.mm if bias is None else partial(torch.addmm, bias)
        product(hidden, weight.T, out=logits.narrow(1, 0, len(weight)))
        return logits
    if not _multiplies_to_fp32(hidden.device.type, hidden.dtype):
        return F.linear(hidden, weight, bias)
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    return logits if bias is None else logits.add_(bias)


def _multiplies_to_fp32(device: str, dtype: torch.dtype) -> bool:
    """Return whether torch.mm returns the product of 16-bit matrices in fp32 (`out_dtype`).

    torch has this overload for CUDA since version 2.8. On ROCm the overload also exists, and raises
    an error (pytorch/pytorch#154221, #161540).
    """
    if device != "cuda" or dtype.itemsize != 2 or torch.version.hip:
        return False
    return "dtype" in torch.ops.aten.mm.overloads()
