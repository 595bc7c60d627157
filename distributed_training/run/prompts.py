"""The prompts of --generate, continued at the end of a run and at evaluations."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypedDict

from torch import nn

from distributed_training.data.chat import prompt_for
from distributed_training.files.json_types import JsonObject
from distributed_training.model.generate import generate
from distributed_training.model.spec import ModelSpec
from distributed_training.ranks.context import DistContext
from distributed_training.settings.output import OutputSettings
from distributed_training.settings.training import TrainingSettings


class GeneratedText(TypedDict):
    """A prompt and what the model made of it."""

    prompt: str
    text: str  # the prompt and its continuation; of a chat, the answer only


@dataclass(frozen=True)
class Prompts:
    """The prompts of --generate."""

    texts: tuple[str, ...]
    seed: int  # the same for each prompt and each time, so that only the weights differ
    eval_only: bool  # see `prompt_for`

    @classmethod
    def of(cls, output: OutputSettings, training: TrainingSettings) -> Prompts:
        """Return the prompts of a run."""
        return cls(output.generate, training.seed, training.eval_only)

    def check(self, spec: ModelSpec, dataset: JsonObject) -> None:
        """Check before the training that each prompt can be used.

        Args:
            dataset: its entry in results.json.
        Raises:
            UserError: one cannot be rendered, or has no token.
        """
        for text in self.texts:
            prompt_for(text, spec.tokenizer, dataset, self.eval_only)

    def continue_all(
        self,
        model: nn.Module,
        casting: AbstractContextManager,
        spec: ModelSpec,
        dataset: JsonObject,
        ctx: DistContext,
        may_stop: bool = False,
    ) -> list[GeneratedText]:
        """Print and return the continuation of each prompt. Every rank calls this method.

        It draws from random generators of its own, and leaves the model in evaluation mode.

        Args:
            casting: the context manager that training uses for the forward pass.
            dataset: its entry in results.json.
            may_stop: end early if a rank has received a stop signal.
        """
        generated: list[GeneratedText] = []
        for text in self.texts:
            if may_stop and ctx.asked_to_stop():
                break
            prompt = prompt_for(text, spec.tokenizer, dataset, self.eval_only)
            continued = generate(model, casting, spec, prompt, self.seed, ctx)
            generated.append({"prompt": text, "text": continued})
        return generated
