"""What a comparison asks an engine: a server, or a program that reads a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from distributed_training.data.conversations import Message
from tools.hand_over.prompt import Prompt

# The largest difference of two logits that rounding may reverse, by the type of the weights.
NEAR_TIES = {"f32": 1e-3, "f16": 1e-2, "bf16": 1e-1}


class Answer(NamedTuple):
    """What an engine returned for a prompt; None: it did not say."""

    text: str
    stopped: bool  # at a token that ends answers, and not after NEW_TOKENS tokens
    tokens: list[int] | None = None  # ids of the answer; the last may be the one that ended it
    prompt_tokens: list[int] | None = None  # ids of the prompt
    prompt_count: int | None = None  # number of them


class Engine(Protocol):
    """An engine with the model that was handed over."""

    name: str
    near_tie: float  # see NEAR_TIES
    quantization: str | None  # of the weights, or None: not quantized, or not known
    cache_in_16_bits: bool  # keys and values of earlier tokens; False: they are in fp32
    continues_texts: bool  # False: it only answers conversations

    def complete(self, prompt: Prompt) -> Answer:
        """Continue a text, or a conversation that is written in the chat template already."""

    def chat(self, prompt: Prompt) -> Answer:
        """Answer a conversation, which the engine writes in its own chat template."""

    def rendered(self, messages: Sequence[Message]) -> str | None:
        """Return a conversation in the engine's chat template; None if it does not say."""

    def close(self) -> None:
        """End what was started."""
