"""--verify against servers with one fault each: the verdict names it, and is silent without one."""

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import completion_server
import pytest
import tokenizer_zoo
import torch
from completion_server import OTHER_TEMPLATE, Served, serving
from conftest import slow
from tokenizers import pre_tokenizers

from distributed_training.trained.source import find_source
from tools.hand_over.compare import result_of
from tools.hand_over.engines import Answer
from tools.hand_over.file_engine import FileEngine
from tools.hand_over.prompt import NEW_TOKENS
from tools.hand_over.prompts import PROMPTS, prompts_of
from tools.hand_over.reference import Reference
from tools.hand_over.server import Server
from tools.hand_over.shim import NO_BOS
from tools.hand_over.verdict import DIFFERENT, EQUAL, verify

KINDS = ("plain", "llama-server", "vllm")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(family, seed): the folder of a model, and what transformers answers."""
    made = {}

    def get(family, seed=0):
        if (family, seed) not in made:
            folder = tmp_path_factory.mktemp("exported") / family
            completion_server.write_model(folder, family, seed)
            made[family, seed] = folder, Reference.load(find_source(str(folder)))
        return made[family, seed]

    return get


def compared(served, reference, load_base=lambda: None):
    """The verdict about a server."""
    with serving(served) as url:
        return verify(Server(url), reference, prompts_of(reference, []), load_base)


def use_other_template(served):
    served.tokenizer.chat_template = OTHER_TEMPLATE


def continue_after_the_end(served):
    served.ends = set()


def begin_twice(served):
    served.bos = 2


def begin_without(served):
    served.bos = 0


def split_as_another_family(served):
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(tokenizer_zoo.Regex(tokenizer_zoo.WORDS), "isolated")
    served.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])


def swap_layers(served):
    inner = served.model.base_model
    layers = inner.h if hasattr(inner, "h") else inner.layers
    first, second = (copy.deepcopy(layer.state_dict()) for layer in layers[:2])
    layers[0].load_state_dict(second)
    layers[1].load_state_dict(first)


FAULTS = {
    use_other_template: ("template", "gpt2"),
    continue_after_the_end: ("stop token", "gpt2"),
    begin_twice: ("BOS twice", "llama"),
    begin_without: ("BOS missing", "llama"),
    split_as_another_family: ("tokenizer", "gpt2"),
    swap_layers: ("weights", "gpt2"),
}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (fault, kind) if kind == "plain" else slow(fault, kind)
        for fault in FAULTS
        for kind in (*KINDS, "silent")
        if not (kind == "silent" and fault in (begin_twice, begin_without, split_as_another_family))
    ],
)
def test_a_planted_fault_is_named(exported, fault, kind):
    cause, family = FAULTS[fault]
    folder, reference = exported(family)
    served = Served(folder, kind)
    fault(served)
    verdict = compared(served, reference)
    assert (verdict.status, verdict.cause.name) == (DIFFERENT, cause), verdict.cause


@pytest.mark.parametrize("kind", [KINDS[0], *map(slow, KINDS[1:])])
def test_adapters_that_are_not_merged_are_named(exported, kind, tmp_path):
    import peft

    folder, _ = exported("qwen2")
    base = Served(folder).model
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    adapted = peft.get_peft_model(base, config)
    adapted.peft_config["default"].base_model_name_or_path = str(folder)
    adapted.save_pretrained(tmp_path)
    source = find_source(str(tmp_path))
    reference = Reference.load(source)
    found = compared(
        Served(folder, kind), reference, lambda: Reference.load(find_source(str(folder)))
    )
    assert found.cause.name == "adapters not merged"
    assert compared(Served(folder, kind), reference).cause.name == "weights"  # base not known


@pytest.mark.parametrize(
    ("family", "seed", "kind"),
    [
        ("gpt2", 0, "plain"),
        ("llama", 0, "llama-server"),
        ("qwen2", 0, "vllm"),
        slow("gpt2", 0, "silent"),
        *(
            slow(family, seed, kind)
            for family in completion_server.FAMILIES
            for seed, kind in enumerate((*KINDS, *KINDS[:2]), 1)
        ),
    ],
)
def test_a_clean_hand_over_is_silent(exported, family, seed, kind):
    folder, reference = exported(family, seed)
    verdict = compared(Served(folder, kind), reference)
    assert verdict.status == EQUAL and verdict.cause is None, verdict.cause
    assert len(verdict.results) == PROMPTS
    assert verdict.equal_tokens == verdict.tokens
    assert sum(result.prompt.is_chat for result in verdict.results) >= 8
    assert any(result.expected.stops for result in verdict.results)
    assert all(len(result.expected.tokens) <= NEW_TOKENS for result in verdict.results)
    reports_ids = kind in ("llama-server", "vllm")
    assert all((result.answer.tokens is not None) == reports_ids for result in verdict.results)


@pytest.mark.parametrize(
    ("ftype", "shown"), [("all F32", None), ("BF16", None), ("Q4_K - Medium", "Q4_K - Medium")]
)
def test_llama_server_says_whether_its_weights_are_quantized(exported, main_of, ftype, shown):
    folder, _ = exported("gpt2")
    served = Served(folder, "llama-server", ftype=ftype)
    with serving(served) as url:
        assert Server(url).quantization == shown
        if shown:
            equal = main_of("hand_over", folder, "--verify", url)
            swap_layers(served)
            other = main_of("hand_over", folder, "--verify", url)
            assert equal.code == 0 and f"weights are quantized ({shown}):" in equal.out
            assert other.code == 1 and f"weights: they are quantized ({shown}), " in other.out


def test_a_server_with_a_short_context_is_one_line(exported, main_of):
    folder, _ = exported("gpt2")
    with serving(Served(folder, "llama-server", context=32)) as url:
        failed = main_of("hand_over", folder, "--verify", url)
    assert failed.code == 2 and "exceeds the available context size" in failed.error
    assert "a context of 320 tokens" in failed.error


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "ollama"])
def test_a_penalty_of_repeated_tokens_is_switched_off(exported, kind):
    """Ollama's is 1.1 by default; a generation_config.json, or a GGUF file, may have one."""
    folder, reference = exported("gpt2")
    served = Served(folder, kind, penalty=1.5)
    verdict = compared(served, reference)
    assert verdict.status == EQUAL, verdict.cause
    assert len(verdict.results) == PROMPTS


def test_a_near_tie_is_no_difference(exported):
    """The engine's rounding may choose the other of two tokens with almost the same logit."""
    folder, reference = exported("gpt2")
    with serving(Served(folder, "vllm")) as url:
        server, prompts = Server(url), prompts_of(reference, [])
        answer = reference.answer(prompts[0])
        tied = answer._replace(
            tokens=[*answer.tokens[:-1], (answer.tokens[-1] + 1) % 300],
            gaps=[*answer.gaps[: len(answer.tokens) - 1], 1e-4, *answer.gaps[len(answer.tokens) :]],
        )
        key = tuple(reference.ids_of(prompts[0]))
        reference._answers[key] = tied
        try:
            verdict = verify(server, reference, prompts)
            assert verdict.status == "equal up to near-ties"
            reference._answers[key] = tied._replace(gaps=[1.0] * len(answer.gaps))
            assert verify(server, reference, prompts).status == DIFFERENT
        finally:
            reference._answers[key] = answer


def test_what_a_cache_in_16_bits_changes_is_a_near_tie(exported):
    """Of weights with large logits it is more than NEAR_TIES says: llama-server gave 0.06."""
    _, reference = exported("llama")
    prompts = prompts_of(reference, [])
    for prompt, position in ((each, place) for each in prompts for place in range(12)):
        expected = reference.answer(prompt)
        gap = expected.gaps[position] if position < len(expected.tokens) else 0
        if 0.01 < gap < reference.rounding(prompt, position):
            break
    other = (expected.tokens[position] + 1) % 300
    answer = Answer("", False, [*expected.tokens[:position], other] + [0] * NEW_TOKENS)
    for in_16_bits in (True, False):
        engine = SimpleNamespace(near_tie=0.01, cache_in_16_bits=in_16_bits)
        found = result_of(engine, reference, prompt, answer)
        assert found.difference.position == position and found.difference.gap == gap
        assert found.differs(0.01) != in_16_bits
    far = next(place for place, gap in enumerate(expected.gaps) if gap > 1)
    assert 0 < reference.rounding(prompt, far) < 1


@pytest.mark.parametrize("has_ids", [True, False])
def test_an_engine_may_end_at_a_special_token(exported, has_ids, monkeypatch):
    """llama.cpp ends at <|endoftext|>, also if the generation configuration does not name it."""
    _, reference = exported("qwen2")
    special = max(reference.special_ids - reference.ends)  # transformers 4 has no <|endoftext|>
    prompts = prompts_of(reference, [])
    prompt = next(each for each in prompts if len(reference.answer(each).tokens) > 6)
    expected = reference.answer(prompt)
    text = reference.text_of(prompt, expected.tokens[:4])
    answer = Answer(text, True, expected.tokens[:4] if has_ids else None)
    engine = SimpleNamespace(near_tie=0.01, cache_in_16_bits=False)

    def compare_with(token):
        tokens = [*expected.tokens[:4], token, *expected.tokens[5:]]
        key = tuple(reference.ids_of(prompt))
        gaps = [1.0] * len(expected.gaps)
        monkeypatch.setitem(reference._answers, key, expected._replace(tokens=tokens, gaps=gaps))
        return result_of(engine, reference, prompt, answer)

    found = compare_with(special)
    assert found.difference is None and found.equal_tokens == len(found.expected.tokens) == 4
    assert compare_with(expected.tokens[4]).differs(0.01)


def test_the_command_prints_the_verdict(main_of, exported):
    folder, _ = exported("gpt2")
    served = Served(folder, "llama-server")
    with serving(served) as url:
        equal = main_of("hand_over", folder, "--verify", url)
        assert equal.code == 0 and "✅ equal" in equal.out
        use_other_template(served)
        other = main_of("hand_over", folder, "--verify", url)
    assert other.code == 1 and "❌ different: template:" in other.out
    assert "/apply-template" in served.requests


def remove_template(folder):
    """Remove the chat template: transformers 4.51 writes it into tokenizer_config.json."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))


CHATS_ONLY = ("/v1/chat/completions",)


def test_a_server_of_conversations_only_is_compared_with_them(main_of, exported, tmp_path):
    """As some gateways: without completions, a list of models, and tokens of a text."""
    folder, _ = exported("llama")
    with serving(Served(folder, paths=CHATS_ONLY)) as url:
        found = main_of("hand_over", folder, "--verify", url)
        texts = shutil.copytree(folder, tmp_path / "texts")
        remove_template(texts)
        refused = main_of("hand_over", texts, "--verify", url)
    assert found.code == 0 and "✅ equal" in found.out
    assert "(0 texts, 8 conversations)" in found.out and "Texts were not compared" in found.out
    assert refused.code == 2 and "has no /v1/completions, and the model cont" in refused.error


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [("plain", "template", "other tokens"), ("silent", "weights", "template or the tokenizer")],
)
def test_a_fault_of_a_server_of_conversations_only(exported, kind, cause, words):
    folder, reference = exported("gpt2")
    served = Served(folder, kind, paths=CHATS_ONLY)
    use_other_template(served)
    with serving(served) as url:
        chats = [prompt for prompt in prompts_of(reference, []) if prompt.is_chat]
        found = verify(Server(url), reference, chats).cause
    assert found.name == cause and words in found.explanation


def test_a_file_without_a_bos_token_has_that_of_llama_cpp(exported):
    """It is the token 11, which a chat template writes: llama-server showed it before each prompt."""
    _, reference = exported("gpt2")
    template = reference.tokenizer.chat_template
    values = {"file_type": 0, "adds_bos": False, "bos": 11, "chat_template": template}
    chat = next(prompt for prompt in prompts_of(reference, []) if prompt.is_chat)
    engine = FileEngine(Path("model.gguf"), SimpleNamespace(**values), reference)
    assert engine.rendered(chat.messages) == reference.tokenizer.decode([11]) + chat.text
    values["chat_template"] = NO_BOS + template  # as --to gguf writes it
    engine = FileEngine(Path("model.gguf"), SimpleNamespace(**values), reference)
    assert engine.rendered(chat.messages) == chat.text
