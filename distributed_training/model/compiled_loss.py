"""The output layer of --compile and --compile_loss: kernels of torch.compile compute its loss.

Eager, log-softmax writes a tensor as large as the logits of a chunk, of which another operation
computes the gradient. Compiled, there is no such tensor: the logits are read for the largest one
and the sum of each row, and again for the gradient.
"""

import torch
import torch.nn.functional as F

from distributed_training.loss_chunks import IGNORED, fits_in_graph
from distributed_training.model import loss


def _cross_entropy(
    logits: torch.Tensor,
    of_targets: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `loss.cross_entropy` returns, in operations that the compiler fuses.

    Args:
        of_targets: the logits of the targets, [tokens, 1]. Read in here, at indices, they would
            keep the compiler from writing the gradient over the logits.
    """
    in_fp32, valid = logits.float(), targets >= 0
    # Not torch.logsumexp: its result has the size of the logits, -100 for GPT-2, and the rounding
    # of such a number is larger than that of the differences.
    largest = in_fp32.amax(1, keepdim=True)
    log_sum = (in_fp32 - largest).exp().sum(1, keepdim=True).log()
    log_p_of_target = of_targets.float() - largest - log_sum
    summed = log_p_of_target.squeeze(1).where(valid, 0).sum()
    factor = (valid * scale).unsqueeze(1)
    if not with_gradient:
        return summed, logits, factor
    columns = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    is_target = columns == targets.int().unsqueeze(1)
    derivative = torch.where(
        is_target, log_p_of_target.expm1(), (in_fp32 - largest - log_sum).exp()
    )
    out = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
    return summed, out.copy_(derivative), factor


# Not fullgraph=True, with which more shapes than the recompile limit are an error: without it torch
# computes further ones eagerly.
_compiled = torch.compile(_cross_entropy, dynamic=False)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `loss.cross_entropy` returns; compiled, except in fp16."""
    # In fp16 the derivative is scaled before it is rounded, because small probabilities would be 0
    # (`loss.ChunkedLoss`): the eager code does this.
    if dtype == torch.float16:
        return loss.cross_entropy(logits, targets, scale, dtype, with_gradient)
    of_targets = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    return _compiled(logits, of_targets, targets, scale, dtype, with_gradient)


class CompiledOutputLayer(loss.OutputLayer):
    """Output layer whose loss is compiled.

    In a compiled forward pass (--compile) it computes all logits at once if they fit: the compiler
    fuses what follows. Otherwise it computes them in chunks, each with compiled kernels.
    """

    cross_entropy = staticmethod(cross_entropy)

    def _loss(self, hidden: torch.Tensor, targets: loss.Targets) -> torch.Tensor:
        count, device = targets.tokens.numel(), targets.tokens.device.type
        if torch.compiler.is_compiling() and fits_in_graph(count, self.out_features, device):
            logits = self._all_logits(hidden).flatten(0, 1).float()
            summed = F.cross_entropy(logits, targets.tokens, ignore_index=IGNORED, reduction="sum")
            return summed / targets.divisor
        return super()._loss(hidden, targets)

    def _all_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of a batch; in 16 bits with the columns of ALIGNMENT, cut off again.

        In fp32 the padded copy would cost as much memory as the weight.
        """
        device, columns = hidden.device.type, self.out_features
        in_16_bits = hidden.dtype.itemsize == 2 or torch.is_autocast_enabled(device)
        padding = -columns % loss.ALIGNMENT.get((device, 2), 1) if in_16_bits else 0
        if not padding:
            return super().forward(hidden)
        weight = F.pad(self.weight, (0, 0, 0, padding))
        bias = None if self.bias is None else F.pad(self.bias, (0, padding))
        return F.linear(hidden, weight, bias).narrow(-1, 0, columns)
