"""A server with the OpenAI completion interface: llama-server, vLLM, Ollama and others."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence

from distributed_training.data.conversations import Message
from distributed_training.errors import UserError, first_line, redact
from distributed_training.files.json_types import JsonObject, lookup
from tools.hand_over.engines import NEAR_TIES, Answer
from tools.hand_over.prompt import CONTEXT, NEW_TOKENS, Prompt

SECONDS = 600  # for an answer: a server may load the model for the first one
# Fields that not all servers know: the others ignore them, or refuse the request (400, 422), which
# is then repeated without them. They ask for the ids of tokens (vLLM; llama-server, whose
# logprobs leave out tokens with a part of a character), and for no penalty of repeated tokens
# (vLLM, llama-server), which a generation_config.json or a GGUF file may set.
OF_VLLM = {"return_token_ids": True, "repetition_penalty": 1.0}
OF_LLAMA_SERVER = {"return_tokens": True, "verbose": True, "repeat_penalty": 1.0}
REFUSED = (400, 422)
MISSING = (404, 405, 501)  # of a path that the server does not have


class Server:
    """A server, whose model is named after # in the URL if it has several."""

    cache_in_16_bits = True  # the default of llama-server, Ollama and vLLM

    def __init__(self, url: str, model_type: str = "f32") -> None:
        """Find out what the server is.

        Args:
            model_type: of the exported weights, a key of NEAR_TIES.
        Raises:
            UserError: it does not answer, or has several models.
        """
        url, _, model = url.partition("#")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.name = redact(self.url)
        self.near_tie = max(NEAR_TIES["f16"], NEAR_TIES[model_type])
        listed = (self._get("/v1/models") or {}).get("data") or []
        models = {str(each.get("id")): each for each in listed}
        if len(models) > 1 and model not in models:
            known = ", ".join([*models][:5])
            raise UserError(f"{self.name} has several models ({known}): name one by URL#MODEL.")
        self.model = model or next(iter(models), "model")
        # llama-server says it: "all F32", "F16", "BF16", "Q8_0", "Q4_K - Medium".
        kind = lookup(models.get(self.model), "meta.ftype")
        self.quantization = None if not kind or kind.endswith(("F32", "F16")) else str(kind)
        self.is_ollama = bool(lookup(self._get("/api/version"), "version"))
        self.continues_texts = self.is_ollama or self._has_completions()
        self._extra = True

    def complete(self, prompt: Prompt) -> Answer:
        """Continue a text, or a conversation that is written in the chat template already."""
        if self.is_ollama:  # its /v1/completions writes a text in the chat template
            return self._native("/api/generate", {"prompt": prompt.text, "raw": True})
        body = {"prompt": prompt.text, **self._greedy}
        answer, choice = self._choice("/v1/completions", body)
        ids = choice.get("prompt_token_ids") or self._tokens_of(prompt.text)
        return self._answer(answer, choice, choice.get("text") or "", ids)

    def chat(self, prompt: Prompt) -> Answer:
        """Answer a conversation, which the server writes in its own chat template."""
        if self.is_ollama:
            return self._native("/api/chat", {"messages": list(prompt.messages)})
        body = {"messages": list(prompt.messages), **self._greedy}
        answer, choice = self._choice("/v1/chat/completions", body)
        ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return self._answer(answer, choice, lookup(choice, "message.content") or "", ids)

    def rendered(self, messages: Sequence[Message]) -> str | None:
        """Return a conversation in the server's chat template, if it is llama-server."""
        answer = self._post("/apply-template", {"messages": list(messages)}, REFUSED + MISSING)
        text = (answer or {}).get("prompt")
        return text if isinstance(text, str) else None

    def close(self) -> None:
        """Do nothing: the user has started the server."""

    @property
    def _greedy(self) -> JsonObject:
        return {"model": self.model, "max_tokens": NEW_TOKENS, "temperature": 0, "seed": 0}

    def _has_completions(self) -> bool:
        """Return whether the server continues texts; some only answer conversations."""
        body = {**self._greedy, "prompt": "a", "max_tokens": 1}
        return self._post("/v1/completions", body, MISSING) is not None

    def _choice(self, path: str, body: JsonObject) -> tuple[JsonObject, JsonObject]:
        """Return the answer to a request, and its first choice."""
        answer = (
            self._post(path, {**body, **OF_VLLM, **OF_LLAMA_SERVER}, REFUSED)
            if self._extra
            else None
        )
        if answer is None:
            self._extra = False
            answer = self._post(path, body) or {}
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices:
            raise UserError(f"{self.name}{path} returns no choices: it is no completion server.")
        return answer, choices[0]

    def _answer(
        self, answer: JsonObject, choice: JsonObject, text: str, prompt_ids: list[int] | None
    ) -> Answer:
        ids = choice.get("token_ids", lookup(answer, "__verbose.tokens"))
        count = lookup(answer, "usage.prompt_tokens")
        return Answer(text, choice.get("finish_reason") == "stop", ids, prompt_ids, count)

    def _native(self, path: str, body: JsonObject) -> Answer:
        """Return the answer to a request of Ollama's own, without its penalty of repetitions."""
        options = {"temperature": 0, "num_predict": NEW_TOKENS, "seed": 0, "repeat_penalty": 1.0}
        body |= {"model": self.model, "stream": False, "options": options}
        answer = self._post(path, body) or {}
        text = answer.get("response") or lookup(answer, "message.content") or ""
        # It has a number of prompt tokens, which may leave out those in its cache.
        return Answer(text, answer.get("done_reason") == "stop")

    def _tokens_of(self, text: str) -> list[int] | None:
        """Return the ids that llama-server makes of a prompt; None for other servers."""
        body = {"content": text, "add_special": True, "parse_special": True}
        ids = lookup(self._post("/tokenize", body, REFUSED + MISSING), "tokens")
        return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else None

    def _get(self, path: str) -> JsonObject | None:
        return self._request(path, None, REFUSED + MISSING)

    def _post(self, path: str, body: JsonObject, accepted: Sequence[int] = ()) -> JsonObject | None:
        return self._request(path, json.dumps(body).encode(), accepted)

    def _request(self, path: str, data: bytes | None, accepted: Sequence[int]) -> JsonObject | None:
        """Return the object that the server answers; None if it answers a status of `accepted`.

        Raises:
            UserError: it does not answer, or answers another error.
        """
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(f"{self.url}{path}", data, headers)
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code in accepted:
                return None
            reason = first_line(Exception(error.read().decode("utf-8", "replace")), 200)
            problem = f"{self.name}{path} answers {error.code} ({redact(reason)})"
            raise UserError(
                f"{problem}: start the server with the model, and a context of {CONTEXT} tokens."
            ) from error
        except (OSError, ValueError) as error:
            problem = f"{self.name}{path} cannot be used ({first_line(error, 200)})"
            raise UserError(f"{problem}: start the server, and name its URL.") from error
        return answer if isinstance(answer, dict) else None
