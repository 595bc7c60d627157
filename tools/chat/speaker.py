"""The loaded model, which streams its answers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from distributed_training import console
from distributed_training.errors import UserError, first_line
from distributed_training.model import weights
from distributed_training.model.config import max_positions, read_config, read_generation_config
from distributed_training.model.generate import end_ids
from distributed_training.model.resolve import be_quiet
from distributed_training.model.tokenizer import read_tokenizer
from distributed_training.ranks import gpus, tuning
from distributed_training.ranks.context import DTYPES
from distributed_training.units import human_count
from tools.chat.conversation import Conversation, Texts
from tools.chat.source import Source

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
        print(text, end="\n" if stream_end else "", flush=True)


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
        be_quiet(False)
        gpus.require_usable()
        device = torch.device("cuda" if gpus.usable_gpus() else "cpu")
        precision = tuning.choose_precision("auto", device)
        tokenizer = read_tokenizer(_tokenizer_folder(source), source.name)
        model = _load_model(source, len(tokenizer), DTYPES[precision])
        generation = read_generation_config(str(source.folder), model.config)
        # Base models have a chat template as well, so a run that trained on text decides.
        is_chat = bool(tokenizer.chat_template) and source.is_chat is not False
        model = model.to(device).eval()
        return cls(source.name, model, tokenizer, generation, is_chat, device, precision)

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
        try:
            self.model.generate(
                inputs=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=options,
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


def _tokenizer_folder(source: Source) -> str:
    """Return the folder of the tokenizer; adapters may have one with more tokens."""
    own = source.adapters and any(source.adapters.glob("tokenizer*"))
    return str(source.adapters if own else source.folder)


def _load_model(source: Source, entries: int, dtype: torch.dtype) -> PreTrainedModel:
    """Load the weights on the CPU, with those of adapters.

    Args:
        entries: of the tokenizer; the embedding is enlarged to them, as in training.
    """
    folder, what = str(source.folder), source.name
    config = read_config(folder, what)
    if weights.check_folder(folder, config, what):
        weights.untie(config)
    model, info = weights.from_folder(folder, config, dtype)
    weights.report_differences(folder, model, info)
    if added := max(0, entries - model.get_input_embeddings().weight.shape[0]):
        torch.manual_seed(0)
        model.resize_token_embeddings(entries)
        console.warn(f"The model has no weights for {added} tokens of its tokenizer: random ones.")
    return _with_adapters(model, source.adapters) if source.adapters else model


def _with_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Attach the adapters in a folder.

    Raises:
        UserError: the files are damaged, or do not fit the model.
    """
    import peft

    try:
        return peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu")
    except weights.LOADING_ERRORS as error:
        raise UserError(
            f"The adapters in {folder} cannot be loaded: {first_line(error, 200)}"
        ) from error
