"""The tokens at which a trained model stops: of --generate, scripts/chat.py and the export."""

from __future__ import annotations

import copy

from transformers import GenerationConfig, PreTrainedTokenizerBase

from distributed_training.data.chat_template import ChatTemplate
from distributed_training.data.turn_ends import ends_of_encoded_turns

ONLY_TEXTS = ("text", "pair", None)  # kinds of rows without a conversation


def end_ids(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, is_chat: bool
) -> set[int]:
    """Return the ids at which generation ends.

    They are those of the generation configuration, and those that training puts at an end: the
    end-of-text token, and what ends an answer or tool calls in the chat template. The generation
    configuration of a base model does not have the latter.
    """
    own = generation.eos_token_id
    found = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    if is_chat:
        template = ChatTemplate(tokenizer)
        ends = [*template.ends_of_turns, template.end_after_answer]
        found |= {*tokenizer.convert_tokens_to_ids([end for end in ends if end])}
        found |= ends_of_encoded_turns(tokenizer)
    return {each for each in found if each is not None}


def generation_after_training(
    tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, kind: str | None
) -> GenerationConfig:
    """Return the generation configuration of a trained model, which names all of its `end_ids`.

    Args:
        generation: of the model before the training.
        kind: of the rows of the training data, see `facts.Kinds`; a mixture's may be "mixed".
    """
    is_chat = kind not in ONLY_TEXTS and bool(tokenizer.chat_template)
    ends, changed = sorted(end_ids(tokenizer, generation, is_chat)), copy.deepcopy(generation)
    if len(ends) > 1:
        changed.eos_token_id = ends
    elif ends:
        changed.eos_token_id = ends[0]
    return changed
