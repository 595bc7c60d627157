"""Text generation at the end of a run, from a model that may be sharded over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from support.cluster.context import DistContext
from support.errors import UserError
from support.model.layers import max_positions
from support.model.resolve import ModelSpec

NEW_TOKENS = 100
TEMPERATURE, TOP_K = 0.8, 50


def tokens_of(prompt: str, tokenizer) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        UserError: the tokenizer returns no token.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"--generate {prompt!r}: this model's tokenizer returns no token for it.")
    return ids


@torch.no_grad()
def generate(model: nn.Module, casting, spec: ModelSpec, args, ctx: DistContext) -> str:
    """Print and return --generate, continued by up to NEW_TOKENS tokens.

    Every rank calls this function, and all ranks return the same text.

    transformers' `generate` would let each rank sample its own tokens. Under zero3, infinity and
    fsdp, layers are gathered for one forward pass at a time. A rank that finished earlier than the
    others would leave them blocked in an all-gather.

    Args:
        model: as wrapped by the strategy.
        casting: the context manager that training uses for the forward pass.
        spec: the model's description.
        args: --generate, whose beginning is cut off if it is longer than the model's context;
            --seed.
        ctx: the ranks.
    Raises:
        UserError: the tokenizer returns no token for the prompt.
    """
    model.eval()
    positions = max_positions(spec.config) or 2**31
    prompt = tokens_of(args.generate, spec.tokenizer)[-(positions - 1) :]
    ids = torch.tensor([prompt], device=ctx.device)
    generator, cache = torch.Generator().manual_seed(args.seed), None
    for _ in range(min(NEW_TOKENS, positions - ids.shape[1])):
        # The compiled graph is for sequences of one length.
        with torch.compiler.set_stance("force_eager"), casting:
            out = model(
                input_ids=ids if cache is None else ids[:, -1:],
                past_key_values=cache,
                use_cache=True,
            )
        # Architectures without a cache compute the whole text again for each token.
        cache = getattr(out, "past_key_values", None)
        likeliest = out.logits[0, -1].float().cpu().topk(min(TOP_K, out.logits.shape[-1]))
        choice = torch.multinomial(
            torch.softmax(likeliest.values / TEMPERATURE, 0), 1, generator=generator
        )
        chosen = likeliest.indices[choice].to(ctx.device)
        dist.broadcast(chosen, src=0)
        if chosen.item() == spec.tokenizer.eos_token_id:
            break
        ids = torch.cat([ids, chosen[None]], dim=1)
    text = spec.tokenizer.decode(ids[0])
    ctx.console.print0(f"💬 {text}")
    return text
