#!/usr/bin/env bash
# release: torch 2.13.0
# finding: FlopCounterMode counts nothing for scaled_dot_product_attention on a CPU, neither forward nor backward; on the meta device it counts the products of the same call.
# guess: The count of an operation does not depend on the device.
# matters: FLOPs per step that were counted on a laptop's CPU lack the attention, so a utilization computed from them is too low, the more the longer the rows.
# instead: Count with the model on the meta device.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.4.6
cd "$work"
"$work/env/bin/python" - <<'PROGRAM'
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

BATCH, HEADS, LENGTH, SIZE = 1, 4, 64, 16
ONE_PRODUCT = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE


def counted(device, backward):
    query = torch.randn(BATCH, HEADS, LENGTH, SIZE, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        output = scaled_dot_product_attention(query, query, query, is_causal=True)
        if backward:
            output.sum().backward()
    return counter.get_total_flops() / ONE_PRODUCT


found = {
    (device, backward): counted(device, backward)
    for device in ("meta", "cpu")
    for backward in (False, True)
}
for (device, backward), products in found.items():
    print(f"{device}, {'forward and backward' if backward else 'forward'}: {products:g} products")
assert list(found.values()) == [2, 6, 0, 0], found
PROGRAM
echo "As found: on a CPU attention has no FLOPs."
