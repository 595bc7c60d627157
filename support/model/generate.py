"""A sample of text at the end of a run, from a model that may be spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from support.cluster.context import Run
from support.errors import UserError
from support.model.resolve import Blueprint, max_positions

NEW_TOKENS = 100
TEMPERATURE, TOP_K = 0.8, 50


def tokens_of(prompt: str, tokenizer) -> list[int]:
    """A prompt's tokens.

    Raises:
        UserError: the tokenizer makes none of it.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not ids:
        raise UserError(f"--generate {prompt!r}: this model's tokenizer makes no token of it.")
    return ids


def generate(model, casting, blueprint: Blueprint, args, run: Run) -> str:
    """Print and return a continuation of --generate; every rank calls it.

    Args:
        model: as wrapped by the strategy.
        casting: the context manager that training computes the forward pass in.
        blueprint: the model's description.
        args: --generate, --seed.
        run: the ranks.
    """
    model.eval()

    def forward(**inputs):
        with casting:
            return model(**inputs)

    limit = max_positions(blueprint.config)
    with torch.compiler.set_stance("force_eager"):  # what was compiled is for blocks of one length
        text = sample_text(
            forward, blueprint.tokenizer, args.generate, run.device, limit, args.seed
        )
    run.say(f"💬 {text}")
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
    """Continue a prompt by up to NEW_TOKENS tokens; every rank calls it, and all return the same
    text.

    transformers' `generate` would let each rank choose for itself. Where layers are gathered for
    one forward pass at a time (zero3, infinity, fsdp) a rank that ends a token earlier than the
    others would leave them waiting for ever.

    Args:
        forward: the model's forward pass; keyword arguments as transformers has them.
        tokenizer: the model's.
        prompt: the text to continue; only its end, where it leaves no room in `positions`.
        device: where the model computes.
        positions: tokens that the model can look at; None for no limit.
        seed: for the choice of tokens.
    """
    room = (positions or 2**31) - 1
    ids = torch.tensor([tokens_of(prompt, tokenizer)[-room:]], device=device)
    generator = torch.Generator().manual_seed(seed)
    cache, end = None, tokenizer.eos_token_id
    for _ in range(min(NEW_TOKENS, room + 1 - ids.shape[1])):
        out = forward(
            input_ids=ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True
        )
        cache = getattr(
            out, "past_key_values", None
        )  # some architectures have none: then the whole text is computed again
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
