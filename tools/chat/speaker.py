"""The loaded model, which streams its answers."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TextStreamer,
)

from distributed_training.console import visible
from distributed_training.errors import UserError
from distributed_training.model.config import max_positions, read_generation_config
from distributed_training.model.stopping import end_ids
from distributed_training.ranks import tuning
from distributed_training.trained.load import is_chat, load, usable_device
from distributed_training.trained.source import Source
from distributed_training.units import human_count
from tools.chat.conversation import Conversation, Texts

NO_LIMIT = 2**31  # positions of an architecture that has no limit
ANSWER_SHARE = 4  # a conversation leaves at least this part of the positions to the answer: 1/4


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float  # 0: always the likeliest token
    top_p: float
    max_new_tokens: int


class Printer(TextStreamer):
    """Prints a text as its tokens arrive, and keeps it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, skip_prompt: bool) -> None:
        """Print special tokens never, and the prompt unless `skip_prompt` is true."""
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next part of the text."""
        self.text += text
        print(visible(text), end="\n" if stream_end else "", flush=True)


@contextmanager
def ended_by_ctrl_c() -> Iterator[StoppingCriteriaList]:
    """Yield a criterion that ends the generation at the next token after Ctrl-C.

    KeyboardInterrupt alone would not do: a destructor that runs at that moment ignores it. A second
    Ctrl-C raises it, for a prompt that takes long.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, frame)
        pressed = True

    def end(ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full((len(ids),), pressed, device=ids.device)

    previous = signal.signal(signal.SIGINT, press)
    try:
        yield StoppingCriteriaList([end])
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass
class Speaker:
    """A model that answers. Its weights are on `device`, in the precision of its computations."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig  # the model's own
    is_chat: bool
    device: torch.device
    precision: str

    @classmethod
    def load(cls, source: Source) -> Speaker:
        """Load a model and its tokenizer onto the GPU, or without one for the CPU.

        Raises:
            UserError: a file is missing or damaged, or the GPU cannot be used.
        """
        device = usable_device()
        precision = tuning.choose_precision("auto", device)
        model, tokenizer = load(source, device, precision)
        generation = read_generation_config(str(source.folder), model.config)
        chats = is_chat(source, tokenizer)
        return cls(source.name, model, tokenizer, generation, chats, device, precision)

    @property
    def title(self) -> str:
        """Describes the model in a line."""
        size = human_count(sum(p.numel() for p in self.model.parameters()))
        return f"{self.name} ({size} parameters, {self.device.type}, {self.precision})"

    @property
    def positions(self) -> int:
        """The tokens of a prompt and its answer."""
        return max_positions(self.model.config) or NO_LIMIT

    def partner(self, sampling: Sampling, system: str | None) -> Conversation | Texts:
        """Return a conversation, or texts to continue for a model that was trained on text.

        Raises:
            UserError: --system cannot be used.
        """
        most = self.positions - min(sampling.max_new_tokens, max(1, self.positions // ANSWER_SHARE))
        if self.is_chat:
            return Conversation(self.tokenizer, most, system)
        if system:
            raise UserError(
                f"--system is for conversations, and {self.name} continues text: leave it out."
            )
        return Texts(self.tokenizer, most)

    def answer(self, ids: list[int], sampling: Sampling, may_be_stopped: bool) -> str:
        """Print and return what the model says after `ids`.

        Of a chat it is the answer only, otherwise the text with its continuation.

        Args:
            may_be_stopped: Ctrl-C ends the answer, and does not raise KeyboardInterrupt.
        """
        printer = Printer(self.tokenizer, skip_prompt=self.is_chat)
        inputs = torch.tensor([ids], device=self.device)
        options = self._options(sampling, self.positions - len(ids))
        with ended_by_ctrl_c() if may_be_stopped else nullcontext() as criteria:
            try:
                self.model.generate(
                    inputs=inputs,
                    attention_mask=torch.ones_like(inputs),
                    generation_config=options,
                    stopping_criteria=criteria,
                    streamer=printer,
                )
            except KeyboardInterrupt:
                printer.end()  # prints what it has kept for the next token
                if not may_be_stopped:
                    raise
        return printer.text.strip()

    def _options(self, sampling: Sampling, room: int) -> GenerationConfig:
        """Return transformers' options; the model's own ones are kept where no flag sets them.

        Args:
            room: positions that are left.
        """
        ends = sorted(end_ids(self.tokenizer, self.generation, self.is_chat))
        options = copy.deepcopy(self.generation)
        options.update(
            max_new_tokens=min(sampling.max_new_tokens, room),
            max_length=None,
            num_beams=1,  # a streamer cannot print several
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_p=sampling.top_p if sampling.temperature else None,
            top_k=0 if sampling.temperature else None,  # 0: all tokens
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
        )
        return options
