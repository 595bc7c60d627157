#!/usr/bin/env bash
# release: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0
# finding: With accumulation over N micro-batches Trainer counts a mixture's router loss N times and the tokens' loss once: with four equal micro-batches the reported loss and the router's gradient have four times the router loss of one.
# guess: Four equal micro-batches have the loss and the gradients of one.
# matters: router_aux_loss_coef means another thing for each accumulation; the same global batch on fewer GPUs pushes the experts towards equal use more strongly.
# instead: Divide router_aux_loss_coef by gradient_accumulation_steps.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile transformers==5.23.0 accelerate==1.15.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import copy

import torch
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments

torch.manual_seed(0)
model = MixtralForCausalLM(MixtralConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
))
tokens = torch.randint(0, 50, (9,)).tolist()
ROW = {"input_ids": tokens, "labels": tokens}


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.router = model.model.layers[0].mlp.gate.weight.grad.clone()


def step(micro_batches, coefficient):
    """Loss and the router's gradient of one step of equal micro-batches."""
    copied = copy.deepcopy(model)
    copied.config.output_router_logits = coefficient > 0
    copied.router_aux_loss_coef = coefficient
    seen = Gradients()
    arguments = TrainingArguments(
        output_dir="out", max_steps=1, per_device_train_batch_size=1, max_grad_norm=0,
        gradient_accumulation_steps=micro_batches, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(copied, arguments, train_dataset=[ROW] * micro_batches, callbacks=[seen])
    return trainer.train().training_loss, seen.router


plain, plain_router = step(1, 0.0)
four_plain, _ = step(4, 0.0)
print(f"without router loss: {plain:.4f} with one micro-batch, {four_plain:.4f} with four")
assert abs(four_plain - plain) < 1e-4
parts = {}
for micro_batches in (1, 4):
    loss, router = step(micro_batches, 1.0)
    parts[micro_batches] = loss - plain, (router - plain_router).norm().item()
    print(f"the router loss adds {parts[micro_batches][0]:.4f} to the loss of {micro_batches}, "
          f"{parts[micro_batches][1]:.4f} to the router's gradient")
for one, four in zip(parts[1], parts[4], strict=True):
    assert abs(four / one - 4) < 0.01, parts
PROGRAM
echo "As found: the router loss is not divided by the accumulation."
