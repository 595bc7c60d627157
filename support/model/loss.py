"""Next-token loss, computed from chunks of the logits.

The logits of a batch ([tokens, vocabulary]) and the tensors that cross_entropy derives from them
are the largest tensors of a step: 2.3 GB for GPT-2 and 4,096 tokens. Here the output layer returns
the loss itself. It computes the logits of a few hundred tokens, their loss and its gradient, and
frees them before the next chunk. PyTorch 2.13 has the same method as
torch.nn.functional.linear_cross_entropy, but older versions do not, and it ignores autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from support.chunks import LOGITS_CHUNK
from support.labels import IGNORED
from support.unwrap import unwrapped

# Types whose gradients need the factor of the loss scaler, see ChunkedLoss.
COMPUTED_IN_BACKWARD = (torch.float16,)


def returns_plain_logits(model: nn.Module) -> bool:
    """Return whether a model's logits are the unmodified result of its output layer.

    Some models scale or cap their logits (Gemma 2, Cohere, Granite), or have adapters on the output
    layer.

    Args:
        model: a causal language model on the meta device; its dtype may be changed.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    outputs: list[tuple[torch.Tensor, int]] = []
    hook = head.register_forward_hook(
        lambda _module, _inputs, output: outputs.append((output, output._version))
    )
    try:
        # On the meta device the grouped matrix multiplication of experts accepts bf16 only.
        for dtype in (torch.float32, torch.bfloat16):
            with contextlib.suppress(Exception), torch.no_grad():
                ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
                logits = model.to(dtype)(input_ids=ids, use_cache=False).logits
                return (
                    len(outputs) == 1
                    and logits is outputs[0][0]
                    and logits._version == outputs[0][1]
                )
            outputs.clear()
        return False  # a model that reads the values of its tensors cannot run on the meta device
    finally:
        hook.remove()


class OutputLayer(nn.Linear):
    """Output layer that returns the loss inside `loss_in_place_of_logits`, and logits otherwise."""

    # [batch, length], the next token of each position, negative for those that do not count; None:
    # return logits.
    targets: torch.Tensor | None = None
    divisor: torch.Tensor | None = None  # scalar tensor that divides the summed loss
    kept_bytes: int = 0  # bytes of the gradients that the last loss keeps until backward

    @classmethod
    def replace_head(cls, model: nn.Module) -> None:
        """Change the class of the model's output layer to this class; the parameters stay."""
        model.get_output_embeddings().__class__ = cls

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [batch, length, vocabulary], or the loss: a scalar in fp32.

        Args:
            hidden: [batch, length, hidden size].
        """
        if self.targets is None:
            return super().forward(hidden)
        return self._loss(hidden)

    @torch.compiler.disable  # the loop over chunks records no graph, so compiling it gains nothing
    def _loss(self, hidden: torch.Tensor) -> torch.Tensor:
        device, dtype = hidden.device.type, hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        inputs = (hidden.flatten(0, 1), self.weight, self.bias)
        targets = self.targets.flatten()
        with torch.autocast(device, enabled=False):
            if not torch.is_grad_enabled():
                return _loss_and_gradients(
                    inputs, targets, 1 / self.divisor, dtype, needed=(False, False, False)
                )[0]
            loss = ChunkedLoss.apply(*inputs, targets, self.divisor, dtype)
        if loss.requires_grad and dtype not in COMPUTED_IN_BACKWARD:
            self.kept_bytes = sum(
                saved.nbytes for saved in loss.grad_fn.saved_tensors if saved is not None
            )
        return loss


@contextlib.contextmanager
def loss_in_place_of_logits(
    model: nn.Module, targets: torch.Tensor, divisor: torch.Tensor
) -> Iterator[bool]:
    """Make the model return the loss in place of its logits, if its output layer is an OutputLayer.

    Yields:
        Whether the model returns the loss.
    """
    head = unwrapped(model).get_output_embeddings()
    if not isinstance(head, OutputLayer):
        yield False
        return
    head.targets, head.divisor = targets, divisor
    try:
        yield True
    finally:
        head.targets = head.divisor = None


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a linear layer's output, summed over the tokens and divided by `divisor`.

    The gradients are computed together with the loss, from the same logits; backward only
    multiplies them. In fp16 most of them would underflow to 0 without the factor of the loss
    scaler, which is known only in backward. In fp16 backward therefore computes the logits again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, divisor, dtype) -> torch.Tensor:
        """Compute the loss and, except in fp16, the gradients.

        Args:
            hidden: [tokens, hidden size].
            weight: [vocabulary, hidden size].
            bias: [vocabulary], or None.
            targets: [tokens]; negative for tokens that do not count.
            divisor: a scalar.
            dtype: of the matrix multiplications.
        """
        ctx.dtype, ctx.in_backward = dtype, dtype in COMPUTED_IN_BACKWARD
        needed = [wanted and not ctx.in_backward for wanted in ctx.needs_input_grad[:3]]
        loss, gradients = _loss_and_gradients(
            (hidden, weight, bias), targets, 1 / divisor, dtype, needed
        )
        ctx.save_for_backward(
            *((hidden, weight, bias, targets, divisor) if ctx.in_backward else gradients)
        )
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, factor):
        """Return the gradients of hidden, weight and bias.

        Args:
            factor: the gradient of the result, a scalar in fp32.
        """
        if ctx.in_backward:
            hidden, weight, bias, targets, divisor = ctx.saved_tensors
            inputs, needed = (hidden, weight, bias), ctx.needs_input_grad[:3]
            _, gradients = _loss_and_gradients(inputs, targets, factor / divisor, ctx.dtype, needed)
        else:
            gradients = [
                None if gradient is None else gradient.mul_(factor)
                for gradient in ctx.saved_tensors
            ]
        return *gradients, None, None, None


def _loss_and_gradients(inputs, targets, scale, dtype, needed):
    """Compute the loss of all chunks and its gradients, both multiplied by `scale`.

    Args:
        inputs: hidden [tokens, hidden size], weight [vocabulary, hidden size], bias [vocabulary] or
            None.
        targets: [tokens].
        scale: a scalar tensor in fp32.
        dtype: of the matrix multiplications; sums over chunks are in fp32.
        needed: whether each of the inputs needs a gradient.
    Returns:
        The loss in fp32, and a list with the gradient of each input, or None.
    """
    hidden, weight, bias = (None if x is None else x.to(dtype) for x in inputs)
    grad_hidden = torch.empty_like(inputs[0]) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None
    loss = torch.zeros((), device=hidden.device)
    for chunk in _chunks(hidden.shape[0], weight.shape[0], hidden.device.type):
        logits = F.linear(hidden[chunk], weight, bias)
        log_p = F.log_softmax(logits, -1, dtype=torch.float32)
        valid = targets[chunk] >= 0
        target = targets[chunk].where(valid, 0)[:, None]
        log_p_of_target = log_p.gather(1, target)
        loss -= log_p_of_target[:, 0].where(valid, 0).sum()
        if not any(needed):
            del logits, log_p
            continue
        # The derivative with respect to the logits is p - 1 for the target and p for all others.
        # expm1 avoids cancellation where p is close to 1.
        derivative = log_p.exp_().scatter_(1, target, log_p_of_target.expm1())
        grad_logits = torch.mul(derivative, (valid * scale)[:, None], out=logits)
        if needed[0]:
            grad_hidden[chunk] = grad_logits @ weight
        if needed[1] and dtype == torch.float32:
            grad_weight.addmm_(grad_logits.T, hidden[chunk])
        elif needed[1]:
            grad_weight += grad_logits.T @ hidden[chunk]
        if needed[2]:
            grad_bias += grad_logits.sum(0, dtype=torch.float32)
        del logits, log_p, derivative, grad_logits  # before the next chunk allocates its own
    gradients = (grad_hidden, grad_weight, grad_bias)
    return loss * scale, [
        g if g is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True)
    ]


def _chunks(tokens: int, vocabulary: int, device: str) -> list[slice]:
    """Return slices of equal size, except the last, each with at most about LOGITS_CHUNK logits."""
    count = -(-tokens * vocabulary // LOGITS_CHUNK[device])
    size = -(-tokens // count)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def next_token_loss(
    model: nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the forward pass and return the sum of the next-token cross entropies / `tokens`.

    Args:
        inputs: token ids, int64 [batch, length].
        labels: int64 [batch, length]; IGNORED for tokens without a loss.
        tokens: scalar tensor, the valid tokens of the whole step on all ranks. The losses of all
            micro-batches and ranks then add up to the mean over tokens.
        positions: int64 [batch, length], which restart at 0 where a document begins, so that
            attention stays within it (see support/model/isolation.py); None: from 0 to length - 1.
    Returns:
        The loss, a scalar in fp32.
    """
    # Shift the labels, not the logits: this saves a copy of the largest tensor of the step.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    options = {} if positions is None else {"position_ids": positions}
    with loss_in_place_of_logits(model, targets, tokens) as chunked:
        output = model(input_ids=inputs, use_cache=False, **options).logits
    if chunked:  # the output layer computed the loss in chunks, so the full logits never existed
        return output
    logits = output.flatten(0, 1).float()
    return (
        F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / tokens
    )
