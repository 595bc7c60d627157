"""Text generation from the model of a run, which may be sharded over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn

from distributed_training import console
from distributed_training.data.chat import Prompt
from distributed_training.model.config import max_positions
from distributed_training.model.spec import ModelSpec
from distributed_training.model.stopping import end_ids
from distributed_training.ranks.context import DistContext

NEW_TOKENS = 100
TEMPERATURE, TOP_K = 0.8, 50


@torch.no_grad()
def generate(
    model: nn.Module,
    casting: AbstractContextManager,
    spec: ModelSpec,
    prompt: Prompt,
    seed: int,
    ctx: DistContext,
) -> str:
    """Print and return a prompt, continued by up to NEW_TOKENS tokens; of a chat, the answer only.

    Every rank calls this function, and all ranks return the same text. transformers' `generate`
    would let each rank sample its own tokens.

    Args:
        casting: the context manager that training uses for the forward pass.
        prompt: its beginning is cut off if it is longer than the model's context.
    """
    model.eval()
    positions = max_positions(spec.config) or 2**31
    prompt_ids = prompt.ids[-(positions - 1) :]
    ids = torch.tensor([prompt_ids], device=ctx.device)
    ends = end_ids(spec.tokenizer, spec.generation, prompt.is_chat)
    generator, cache = torch.Generator().manual_seed(seed), None
    for _ in range(min(NEW_TOKENS, positions - ids.shape[1])):
        # The compiled graphs are for sequences of a few lengths.
        with torch.compiler.set_stance("force_eager"), casting:
            out = model(
                input_ids=ids if cache is None else ids[:, -1:],
                past_key_values=cache,
                use_cache=True,
            )
        # Architectures without a cache compute the whole text again for each token.
        cache = getattr(out, "past_key_values", None)
        chosen = _sample(out.logits[0, -1], generator).to(ctx.device)
        dist.broadcast(chosen, src=0)
        if chosen.item() in ends:
            break
        ids = torch.cat([ids, chosen[None]], dim=1)
    hidden = prompt.start if len(prompt_ids) == len(prompt.ids) else 0
    text = spec.tokenizer.decode(ids[0, hidden:])
    if prompt.is_chat:
        answer = ids[0, len(prompt_ids) :]
        text = spec.tokenizer.decode(answer, skip_special_tokens=True).strip()
    console.print0(f"💬 {text}")
    return text


def _sample(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw one of the TOP_K likeliest tokens on the CPU: a tensor with its id."""
    likeliest = logits.float().cpu().topk(min(TOP_K, len(logits)))
    probabilities = torch.softmax(likeliest.values / TEMPERATURE, 0)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return likeliest.indices[choice]
