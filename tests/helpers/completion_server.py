"""A server with the OpenAI completion interface that answers with transformers, and small models."""

import contextlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import tokenizer_zoo
import torch
from tokenizers import decoders, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
)

from distributed_training.data.special_tokens import number_of_ids
from distributed_training.model.description import write_description
from distributed_training.model.spec import ModelSpec, WeightSource
from distributed_training.model.weights import as_dtype
from distributed_training.trained.source import find_source
from tools.hand_over.prompt import NEW_TOKENS
from tools.hand_over.prompts import prompts_of
from tools.hand_over.reference import Reference

CHATML = (
    "{{ bos_token or '' }}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OTHER_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}[assistant]"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
POSITIONS = 256
FAMILIES = ("gpt2", "llama", "qwen2")
CONVERTED = (*FAMILIES, "bloom", "gpt_neox", "granite", "mistral", "olmo2", "qwen3", "qwen3_moe")
CONVERTED += ("smollm3",)
WITH_BOS = ("llama", "mistral")
RANGE = {"initializer_range": 0.6}
OF_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, **RANGE}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **RANGE}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": POSITIONS, "num_key_value_heads": 2}
OWN_SIZES = {
    "bloom": {"hidden_size": 32, "seq_length": POSITIONS},  # the converter reads it
    "qwen3": {"head_dim": 8},
    "smollm3": {"pad_token_id": None},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
}
# llama.cpp always divides by the sum of the chosen experts, as the models of Qwen do.
OWN_SIZES["qwen3_moe"] |= {"moe_intermediate_size": 32, "norm_topk_prob": True}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A tokenizer with the rule of GPT-2 or of Qwen2; those of WITH_BOS begin texts with <s>."""
    made = tokenizer_zoo.qwen() if family.startswith("qwen") else tokenizer_zoo.gpt2()
    made.decoder = decoders.ByteLevel()
    bos = {"bos_token": "<s>"} if family in WITH_BOS else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", **bos)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[:1]})
    if bos:
        numbers = [("<s>", tokenizer.bos_token_id)]
        begin = processors.TemplateProcessing(single="<s> $A", special_tokens=numbers)
        tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.chat_template = CHATML
    return tokenizer


def config_of(family: str, vocabulary: int) -> PretrainedConfig:
    """The configuration of a model of two blocks."""
    sizes = OF_GPT2 if family in ("gpt2", "bloom") else SIZES
    own = OWN_SIZES.get(family, {})
    return AutoConfig.for_model(family, **{**sizes, **own}, vocab_size=vocabulary)


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a model as a run exports it; its answers end, because an ordinary token ends them."""
    tokenizer = tokenizer_of(family)
    # More rows than ids: transformers adds a token to a tokenizer that it loads for Qwen2.
    config = config_of(family, number_of_ids(tokenizer) + 4)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    generation = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    spec = ModelSpec(config, tokenizer, generation, WeightSource("", 0), POSITIONS)
    write_description(spec, folder, "chat", torch.float32)
    reference = Reference.load(find_source(str(folder)))
    answers = [reference.answer(prompt).tokens for prompt in prompts_of(reference, [])[:8]]
    later = Counter(token for tokens in answers for token in {*tokens[3:24]} - {*tokens[:3]})
    generation.eos_token_id = [tokenizer.eos_token_id, later.most_common(1)[0][0]]
    write_description(spec, folder, "chat", torch.float32)
    return folder


@dataclass
class Served:
    """What a server serves, which a test may change."""

    folder: Path
    kind: str = "plain"  # or "llama-server", "vllm", "ollama", "silent": what it says of tokens
    paths: tuple[str, ...] | None = None  # those that it has; None: all of its kind
    bos: int | None = None  # number of start tokens of a prompt; None: those of the tokenizer
    context: int | None = None  # tokens of llama-server's context; None: enough
    ftype: str | None = None  # type of the weights in llama-server's list of models
    penalty: float = 1.0  # of repeated tokens, if a request does not set it
    model: object = None
    tokenizer: object = None
    ends: set = field(default_factory=set)
    requests: list = field(default_factory=list)

    def __post_init__(self):
        reference = Reference.load(find_source(str(self.folder)))
        self.model = AutoModelForCausalLM.from_pretrained(
            self.folder, **as_dtype(torch.float32)
        ).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.ends, self.start = set(reference.ends), reference.start

    def encode(self, text: str) -> list[int]:
        start = self.start if self.bos is None else self.start[:1] * self.bos
        return [*start, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def render(self, messages) -> str:
        options = {"tokenize": False, "add_generation_prompt": True}
        return self.tokenizer.apply_chat_template(messages, **options)

    @torch.no_grad()
    def generate(self, ids: list[int], penalty: float) -> tuple[list[int], bool]:
        found, cache, inputs = [], None, torch.tensor([ids])
        penalize = RepetitionPenaltyLogitsProcessor(penalty)
        while len(found) < NEW_TOKENS:
            out = self.model(input_ids=inputs, past_key_values=cache, use_cache=True)
            logits = penalize(torch.tensor([[*ids, *found]]), out.logits[:, -1])
            token, cache = int(logits.argmax()), out.past_key_values
            if token in self.ends:
                return found, True
            found.append(token)
            inputs = torch.tensor([[token]])
        return found, False

    def answer(self, path: str, body: dict) -> dict | None:
        """The answer to a request; None: the server does not have the path."""
        self.requests.append(path)
        if self.paths is not None and path not in self.paths:
            return None
        if self.kind == "llama-server" and path == "/tokenize":
            return {"tokens": self.encode(body["content"])}
        if self.kind == "llama-server" and path == "/apply-template":
            return {"prompt": self.render(body["messages"])}
        if self.kind == "ollama":
            return self._native(path, body)
        if path == "/v1/completions":
            return self._completion(self.encode(body["prompt"]), body, lambda t: {"text": t})
        if path == "/v1/chat/completions":
            ids = self.encode_chat(body["messages"])
            return self._completion(ids, body, lambda t: {"message": {"content": t}})
        return None

    def encode_chat(self, messages) -> list[int]:
        start = "".join(self.tokenizer.convert_ids_to_tokens(self.start))
        return self.encode(self.render(messages).removeprefix(start))

    def text_of(self, tokens: list[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(tokens, **options)

    def _native(self, path: str, body: dict) -> dict | None:
        """The answer of Ollama, whose /v1/completions writes a text in the chat template."""
        if path == "/api/generate" and body["raw"]:
            ids = self.encode(body["prompt"])
        elif path == "/api/chat":
            ids = self.encode_chat(body["messages"])
        else:
            return None
        tokens, stopped = self.generate(ids, body["options"].get("repeat_penalty", self.penalty))
        text = self.text_of(tokens)
        content = {"message": {"content": text}} if path == "/api/chat" else {"response": text}
        return {**content, "done_reason": "stop" if stopped else "length", "prompt_eval_count": 1}

    def _completion(self, ids: list[int], body: dict, content) -> dict:
        if self.context and len(ids) > self.context:
            problem = f"request ({len(ids)} tokens) exceeds the available context size"
            return {"error": {"code": 400, "message": problem}}
        names = {"llama-server": "repeat_penalty", "vllm": "repetition_penalty"}
        tokens, stopped = self.generate(ids, body.get(names.get(self.kind), self.penalty))
        choice = content(self.text_of(tokens))
        choice["finish_reason"] = "stop" if stopped else "length"
        if self.kind == "vllm" and body.get("return_token_ids"):
            choice |= {"token_ids": tokens, "prompt_token_ids": ids}
        more = {} if self.kind == "silent" else {"usage": {"prompt_tokens": len(ids)}}
        if self.kind == "llama-server" and body.get("verbose"):  # as build 11669 writes it
            whole = [*tokens, *sorted(self.ends)[:stopped]] if body["return_tokens"] else []
            more["__verbose"] = {"tokens": whole, "stop_type": "eos" if stopped else "limit"}
        return {"choices": [choice], **more}


@contextlib.contextmanager
def serving(served: Served):
    """Yield the URL of a server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            listed = [{"id": "tiny", **({"meta": {"ftype": served.ftype}} if served.ftype else {})}]
            answers = {"/v1/models": {"data": listed}} if served.paths is None else {}
            if served.kind == "ollama":
                answers["/api/version"] = {"version": "0.12.0"}
            self._reply(answers.get(self.path))

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            self._reply(served.answer(self.path, json.loads(self.rfile.read(length))))

        def _reply(self, answer):
            answer = {"error": {"code": 404}} if answer is None else answer
            content = json.dumps(answer).encode()
            self.send_response(answer["error"]["code"] if "error" in answer else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
