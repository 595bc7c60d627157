"""Text generation at the end of a run, from a model that may be sharded over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

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
        raise UserError(f"--generate {prompt!r}: this model's tokenizer makes no token of it.")
    return ids


def generate(model, casting, spec: ModelSpec, args, ctx: DistContext) -> str:
    """Print and return a continuation of --generate. Every rank calls this function.

    Args:
        model: as wrapped by the strategy.
        casting: the context manager that training uses for the forward pass.
        spec: the model's description.
        args: --generate, --seed.
        ctx: the ranks.
    """
    model.eval()

    def forward(**inputs):
        with casting:
            return model(**inputs)

    limit = max_positions(spec.config)
    # The compiled graph is for sequences of one length.
    with torch.compiler.set_stance("force_eager"):
        text = sample_text(forward, spec.tokenizer, args.generate, ctx.device, limit, args.seed)
    ctx.console.print0(f"💬 {text}")
    return text


@torch.no_grad()
def sample_text(
    forward: Callable,
    tokenizer,
    prompt: str,
    device: torch.device,
    positions: int | None,
    seed: int,
) -> str:
    """Continue a prompt by up to NEW_TOKENS tokens.

    Every rank calls this function, and all ranks return the same text.

    transformers' `generate` would let each rank sample its own tokens. Under zero3, infinity and
    fsdp, layers are gathered for one forward pass at a time. A rank that finished earlier than the
    others would leave them blocked in an all-gather.

    Args:
        forward: the model's forward pass, with the keyword arguments of transformers.
        tokenizer: the model's tokenizer.
        prompt: the text to continue; its beginning is cut off if it has more than `positions` - 1
            tokens.
        device: the device that the model computes on.
        positions: maximum length of the model's context in tokens; None for no limit.
        seed: of the generator that samples the tokens.
    Raises:
        UserError: the tokenizer returns no token for the prompt.
    """
    room = (positions or 2**31) - 1
    ids = torch.tensor([tokens_of(prompt, tokenizer)[-room:]], device=device)
    generator = torch.Generator().manual_seed(seed)
    cache, end = None, tokenizer.eos_token_id
    for _ in range(min(NEW_TOKENS, room + 1 - ids.shape[1])):
        out = forward(
            input_ids=ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True
        )
        # Architectures without a cache compute the whole text again for each token.
        cache = getattr(out, "past_key_values", None)
        likeliest = out.logits[0, -1].float().cpu().topk(min(TOP_K, out.logits.shape[-1]))
        choice = torch.multinomial(
            torch.softmax(likeliest.values / TEMPERATURE, 0), 1, generator=generator
        )
        chosen = likeliest.indices[choice].to(device)
        dist.broadcast(chosen, src=0)
        if chosen.item() == end:
            break
        ids = torch.cat([ids, chosen[None]], dim=1)
    return tokenizer.decode(ids[0])
