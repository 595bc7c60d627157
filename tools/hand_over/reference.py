"""What the exported model says in transformers: in fp32 on the CPU, always the likeliest token."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import DynamicCache

from distributed_training.data.chat_template import Chat, ChatTemplate
from distributed_training.data.conversations import Message
from distributed_training.data.special_tokens import start_of
from distributed_training.model.config import max_positions, read_generation_config
from distributed_training.model.stopping import end_ids
from distributed_training.trained.load import is_chat, load
from distributed_training.trained.source import Source
from tools.hand_over.prompt import NEW_TOKENS, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")
SMALL = 25_000_000  # parameters


class HalfCache(DynamicCache):
    """A cache whose keys and values are rounded to fp16, as most engines store them."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of a layer, [batch, heads, tokens, head size]; return all."""
        rounded = (states.half().to(states.dtype) for states in (key_states, value_states))
        return super().update(*rounded, *args, **options)


class Expected(NamedTuple):
    """The continuation of a prompt."""

    tokens: list[int]  # without the token that ends it
    stops: bool  # whether the model ends it within NEW_TOKENS
    gaps: list[float]  # difference of the two best logits, of each token and of the end


@dataclass
class Reference:
    """A model in transformers, and how its tokenizer reads prompts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ends: set[int]
    is_chat: bool
    _answers: dict[tuple[int, ...], Expected] = field(default_factory=dict)

    @classmethod
    def load(cls, source: Source) -> Reference:
        """Load a trained model, with its adapters if it has some.

        Raises:
            UserError: a file is missing or damaged.
        """
        model, tokenizer = load(source, CPU, "fp32")
        if sum(parameter.numel() for parameter in model.parameters()) < SMALL:
            torch.set_num_threads(1)  # several wait for each other for longer than they compute
        generation = read_generation_config(str(source.folder), model.config)
        chats = is_chat(source, tokenizer)
        return cls(model, tokenizer, end_ids(tokenizer, generation, chats), chats)

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of the tokenizer's special tokens."""
        added = self.tokenizer.added_tokens_decoder.items()
        return {number for number, token in added if token.special}

    @property
    def start(self) -> list[int]:
        """The ids with which the tokenizer begins a text."""
        return start_of(self.tokenizer)

    @property
    def positions(self) -> int | None:
        """The longest sequence of the model; None: no limit."""
        return max_positions(self.model.config)

    def render(self, messages: list[Message]) -> str:
        """Return a conversation in the chat template, up to the prompt of the answer.

        Raises:
            ValueError: the template refuses it.
        """
        return ChatTemplate(self.tokenizer).render(Chat(messages), add_generation_prompt=True)

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, as in training."""
        ids = self.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        return ids if prompt.messages else [*self.start, *ids]

    def answer(self, prompt: Prompt) -> Expected:
        """Return how the model continues a prompt; each is computed once."""
        ids = tuple(self.ids_of(prompt))
        if ids not in self._answers:
            self._answers[ids] = self._generate(ids)
        return self._answers[ids]

    @torch.no_grad()
    def _generate(self, ids: tuple[int, ...]) -> Expected:
        found, cache, inputs = Expected([], False, []), None, torch.tensor([ids])
        whole = inputs
        for _ in range(NEW_TOKENS):
            out = self.model(input_ids=inputs, past_key_values=cache, use_cache=True)
            best = out.logits[0, -1].float().topk(2)
            found.gaps.append(float(best.values[0] - best.values[1]))
            token = int(best.indices[0])
            if token in self.ends:
                return found._replace(stops=True)
            found.tokens.append(token)
            cache, inputs = getattr(out, "past_key_values", None), torch.tensor([[token]])
            whole = torch.cat([whole, inputs], dim=1)
            if cache is None:  # an architecture without a cache
                inputs = whole
        return found

    @torch.no_grad()
    def rounding(self, prompt: Prompt, position: int) -> float:
        """Return what a cache in 16 bits may change of the difference of two logits.

        Args:
            position: number of tokens of the answer after which the logits are taken.
        """
        ids = torch.tensor([[*self.ids_of(prompt), *self.answer(prompt).tokens[:position]]])
        caches: tuple = DynamicCache(), HalfCache()
        if not getattr(self.model, "_supports_cache_class", True):  # GPT-2 before transformers 4.53
            # Only the last token then reads rounded keys and values.
            past = self.model(input_ids=ids[:, :-1], use_cache=True).past_key_values
            ids = ids[:, -1:]
            caches = past, [[states.half().to(states.dtype) for states in both] for both in past]
        exact, rounded = (
            self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
            for cache in caches
        )
        return 2 * float((exact - rounded).abs().max())

    def text_of(self, prompt: Prompt, tokens: list[int]) -> str:
        """Return the text of the first tokens of an answer, comparable with `comparable`."""
        before = self.ids_of(prompt)[-1:]
        # A decoder may strip the first space of a text, so the last token of the prompt is decoded
        # as well; but not a special one, which is hidden.
        both = [self._decode(before), self._decode([*before, *tokens])]
        text = both[1].removeprefix(both[0]) if both[1].startswith(both[0]) else both[1]
        return comparable(text)

    def _decode(self, ids: list[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **options)


def comparable(text: str) -> str:
    """Return a text without what programs write in different ways.

    Bytes that are not UTF-8 become one or several replacement characters; at the end they may be
    the beginning of a character, and are left out.
    """
    return re.sub("\ufffd+", "\ufffd", text).rstrip("\ufffd")


def base_of(source: Source, results: dict) -> Source | None:
    """Return the base model of adapters, or of a run that has merged them; None if not known."""
    if source.adapters:
        return Source(source.name, source.folder, is_chat=source.is_chat)
    flags = results.get("flags") or {}
    base = Path(str(flags.get("model")))
    if flags.get("lora_r") and (base / "config.json").is_file():
        return Source(str(base), base, is_chat=source.is_chat)
    return None
