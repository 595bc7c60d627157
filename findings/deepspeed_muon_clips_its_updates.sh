#!/usr/bin/env bash
# release: deepspeed 0.19.8, torch 2.13.0
# finding: With DeepSpeed's Muon, gradient clipping and the reported gradient norm are of the orthogonalized updates of the matrices, not of their gradients. With gradient_clipping 1.0 the update of a 64 x 64 matrix has the norm 1.00 instead of 6.83 (torch.optim.Muon), whether its gradient is small or large, and 0.58 next to an embedding named wte, as in GPT-2, which is Muon's as well.
# guess: Clipping acts on gradients. Muon's update has no dependence on their scale, so clipping changes nothing.
# matters: 1.0 is the usual value. The norm of the updates grows with the size of the model, so a learning rate that is right for another Muon, or for another model, is too small by this factor.
# instead: Set "gradient_clipping": 0.0 with this optimizer; without the key this release clips to 1.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile setuptools wheel torch==2.13.0 numpy==2.4.6
"$work/env/bin/pip" install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
cd "$work"
cat > train.py <<'PROGRAM'
import socket

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param

SIZE = 64
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
torch.distributed.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
)


class Model(torch.nn.Module):
    def __init__(self, tokens):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(SIZE, SIZE, bias=False)
        self.wte = torch.nn.Embedding(tokens, SIZE) if tokens else None

    def forward(self, rows):
        if self.wte is not None:
            rows = self.wte(torch.arange(SIZE) % self.wte.num_embeddings) + rows
        return self.fc(rows).square().sum()


def update(optimizer, scale, clip=None, tokens=0):
    """Norm of the first update of fc with rate 1 and no decay, and the reported gradient norm."""
    model, rows = Model(tokens), torch.randn(SIZE, SIZE, generator=torch.manual_seed(1))
    before = model.fc.weight.detach().clone()
    if optimizer == "torch":
        muon = torch.optim.Muon([model.fc.weight], lr=1.0, weight_decay=0.0)
        (model(rows) * scale).backward()
        muon.step()
        return (model.fc.weight - before).norm().item(), None
    engine, *_ = deepspeed.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": clip,
        "zero_optimization": {"stage": optimizer, "reduce_scatter": False},
        "optimizer": {"type": "Muon", "params": {"lr": 1.0, "weight_decay": 0.0}},
    })
    if tokens:
        print(f"RESULT stage {optimizer}: Muon updates wte: {engine.module.wte.weight.use_muon}")
        assert engine.module.wte.weight.use_muon
    engine.backward(engine(rows) * scale)
    engine.step()
    after = safe_get_full_fp32_param(engine.module.fc.weight)
    return (after - before).norm().item(), float(engine.get_global_grad_norm())


expected, _ = update("torch", 1.0)
print(f"RESULT torch.optim.Muon: update {expected:.2f}")
for stage in (1, 2):
    for scale in (1e-3, 1.0):
        free, _ = update(stage, scale, clip=0.0)
        clipped, norm = update(stage, scale, clip=1.0)
        print(f"RESULT stage {stage}, gradients x {scale:g}: update {free:.2f} without clipping, "
              f"{clipped:.2f} with 1.0; reported gradient norm {norm:.2f}")
        assert abs(free - expected) < 0.05 * expected and abs(norm - free) < 0.01 * free
        assert abs(clipped - 1) < 0.01
    with_embedding, _ = update(stage, 1.0, clip=1.0, tokens=2 * SIZE)
    print(f"RESULT stage {stage}: update of fc {with_embedding:.2f} next to wte")
    assert with_embedding < 0.9
PROGRAM
RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 "$work/env/bin/python" train.py > output 2>&1 || { cat output; exit 1; }
grep -o "RESULT.*" output | cut -d " " -f 2-
echo "As found: clipping and the reported norm are of Muon's updates."
