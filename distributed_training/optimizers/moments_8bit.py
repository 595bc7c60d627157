"""Adam's moments in the 8 bits of bitsandbytes, converted to fp32 and back."""

from collections.abc import Iterator
from typing import Any

import torch

# bitsandbytes' names of the moments: the codes, their values, and the scale of each block of BLOCK
# elements. Small parameters have fp32 moments under the name of the codes.
NAMES = {"exp_avg": ("state1", "qmap1", "absmax1"), "exp_avg_sq": ("state2", "qmap2", "absmax2")}
BLOCK = 256
PART = 2**16 * BLOCK  # elements that are converted at a time


def load(optimizer: Any, key: torch.Tensor, create: bool) -> dict[str, torch.Tensor]:
    """Return the moments of a master in fp32, in host memory if they are copies.

    Args:
        create: create missing moments of 0, as the first update of bitsandbytes does.
    """
    from bitsandbytes.functional import dequantize_blockwise

    if create and not optimizer.state.get(key):
        group = optimizer.param_groups[0]
        params, group["params"] = group["params"], [key]  # stage 3's groups are empty between steps
        optimizer.init_state(group, key, 0, 0)
        group["params"] = params
    state = optimizer.state.get(key)
    moments: dict[str, torch.Tensor] = {}
    for moment, (codes, values, scale) in NAMES.items() if state else ():
        flat = moments[moment] = state[codes]
        if flat.dtype != torch.uint8:
            continue
        moments[moment] = torch.empty(flat.numel())
        for part, blocks in _parts(flat.numel()):
            moments[moment][part] = dequantize_blockwise(
                flat.view(-1)[part],
                absmax=state[scale][blocks],
                code=state[values],
                blocksize=BLOCK,
            )
    return moments


def store(moments: dict[str, torch.Tensor], state: dict) -> None:
    """Write moments in fp32 to the state of a master; the inverse of `load`.

    bitsandbytes' own function takes the largest magnitude as the scale. Its signed codes go from
    -0.993 to 1, so a block with a negative extreme would shrink in each conversion.
    """
    for moment, (codes, values, scale) in NAMES.items():
        if state[codes].dtype != torch.uint8:
            continue
        whole, table = moments[moment].flatten(), state[values]
        for part, blocks in _parts(len(whole)):
            flat = whole[part].to(table.device)
            rows = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
            scales = rows.amax(1) / table[-1]
            if table[0] < 0:
                scales = torch.maximum(scales, rows.amin(1) / table[0])
            scaled = rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
            found = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
            state[codes].view(-1)[part] = found.view(-1)[: len(flat)].to(torch.uint8)
            state[scale][blocks] = scales


def _parts(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive parts of a tensor, each as its elements and its blocks of 8-bit codes."""
    for start in range(0, numel, PART):
        stop = min(start + PART, numel)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
