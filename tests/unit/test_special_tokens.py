"""Tokens that begin a text and end an answer: documents, pairs, conversations, prompts; a notice if
no answer ends, and the digest of tokens that a template changes with the date.
"""

import datetime
import json
from types import SimpleNamespace

import numpy as np
import pytest
from streams import ids_of, stream_of, tokenized
from tokenizer_zoo import tokenizer_of, with_gap
from tokenizers import decoders, processors
from tool_templates import QWEN, with_template

from distributed_training.checkpoints.other_runs import refuse_other_run
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.chat import prompt_of
from distributed_training.data.corpus import open_corpus, open_split
from distributed_training.data.sequences import Padding
from distributed_training.data.special_tokens import number_of_ids
from distributed_training.errors import UserError

EOS = "<|end|>"
TEXTS = ["the quick brown fox", "jumps over", "the lazy dog"]


def answers(begin="", end=""):
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        + f"A: {begin}{{{{ m.content }}}}{end}"
        + "{% else %}Q: {{ m.content }}\n{% endif %}{% endfor %}"
        + "{% if add_generation_prompt %}A: {% endif %}"
    )


def in_block(inside, after=""):
    return answers("{% generation %}", inside + "{% endgeneration %}" + after)


# A template, and what must be told: nothing, that there is no end, or that a line break is trained.
TEMPLATES = {
    "directly": (answers(end=EOS), None),
    "and a line break": (answers(end=EOS + "\n\n"), None),
    "Llama 2": (answers(end=" " + EOS), None),
    "in the block": (in_block(EOS), None),
    "in the block, with a line break behind": (in_block(EOS + "\n"), None),
    "in the block, with a line break before": (in_block("\n" + EOS), None),
    "an added token that is not special": (answers(end="<|eot|>\n"), None),
    "another special token": (answers(end="<|im_end|>\n"), None),
    "after a line break": (answers(end="\n" + EOS), "line break"),
    "after line breaks": (answers(end=" \n\n<|im_end|>\n"), "line break"),
    "behind the block": (in_block("", EOS), "generation"),
    "a line break, behind the block": (in_block("", "\n" + EOS), "generation"),
    "text": (answers(end="<|stop|>\n"), "<|stop|>"),
    "text in the block": (in_block("<|stop|>\n"), "generation"),
    "nothing": (answers(end=""), "''"),
    "only a line break": (answers(end="\n\n"), "--chat_template"),
    "text before it": (answers(end="STOP" + EOS), "STOP"),
    "only the next question": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% endif %}{{ m.content }}\n"
        "{% endfor %}",
        "--chat_template",
    ),
}


ANSWERS = [f"jumps {n} " * (1 + n % 2) + "dogs" for n in range(6)]


def chat_tokenizer(template):
    tokenizer = tokenizer_of("gpt2")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.add_tokens(
        ["<|eot|>", "</b>", "\n\n"]
    )  # as Gemma's tokenizer has HTML and line breaks
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.chat_template = template
    return tokenizer


def conversations(folder, turns=1):
    question = {"role": "user", "content": "the fox?"}
    rows = [[question, {"role": "assistant", "content": answer}] * turns for answer in ANSWERS]
    return as_rows(folder / "chat.jsonl", [{"messages": row} for row in rows])


def as_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def notices(file, tokenizer, folder, capsys, *flags):
    """What is told about a dataset, before the training and before that of a stream."""
    found = []
    flags = ["--dataset", file, "--cache_dir", folder, "--seq_length", "64", *flags]
    settings = parse_arguments([str(flag) for flag in flags])
    ctx = SimpleNamespace(device=SimpleNamespace(type="cpu"), once_per_node=lambda name, do: do())
    ctx.all_gather = lambda value: [value]
    capsys.readouterr()
    data = settings.data
    padding = Padding(data.seq_length, 8)
    open_corpus(data, settings.training, ctx, tokenizer, padding, str(file))
    found.append(capsys.readouterr().out)
    options = {"packing": data.packing, "train_on": data.train_on}
    stream = stream_of(file, tokenizer, seq_length=data.seq_length, **options)
    stream.first_sequence()
    found.append(capsys.readouterr().out)
    return [[line for line in out.splitlines() if "ℹ️" in line] for out in found]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_answer_ends_with_a_trained_end_token(tmp_path, capsys, name):
    template, told = TEMPLATES[name]
    tokenizer = chat_tokenizer(template)
    flags = ["--packing"] if name == "text" else []
    for lines in notices(conversations(tmp_path), tokenizer, tmp_path, capsys, *flags):
        assert len(lines) == (told is not None), lines
        assert told is None or told in lines[0]
        assert told in (None, "line break") or "No answer ends" in lines[0]


# With --train_on all, what follows an answer is trained, also outside of a block and after text.
ENDS_WITH_ALL = {"behind the block", "a line break, behind the block", "text before it"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_answer_ends_with_a_trained_end_token_although_all_is_trained(tmp_path, capsys, name):
    template, told = TEMPLATES[name]
    tokenizer = chat_tokenizer(template)
    found = notices(conversations(tmp_path), tokenizer, tmp_path, capsys, "--train_on", "all")
    for lines in found:
        is_told = told not in (None, "line break") and name not in ENDS_WITH_ALL
        assert ["No answer ends" in line for line in lines if "line break" not in line] == (
            [True] * is_told
        )


def test_the_end_of_the_question_is_not_that_of_the_answer(tmp_path, capsys):
    """With --train_on all, if --seq_length cuts off the answers; both end with the same token.

    What follows the first answer does not count.
    """
    asked = {"role": "user", "content": "a"}
    short, long = ({"role": "assistant", "content": "fox " * n} for n in (1, 99))
    flags = ["--train_on", "all", "--seq_length"]
    cases = [("24", [asked, long], True), ("512", [asked, long], False)]
    cases += [("48", [asked, short, asked, long, asked], False)]
    for number, (length, messages, told) in enumerate(cases):
        file = as_rows(tmp_path / f"{number}.jsonl", [{"messages": messages}] * 6)
        for lines in notices(file, with_template(QWEN), tmp_path, capsys, *flags, length):
            assert ["--seq_length cuts off" in line for line in lines] == [True] * told


def test_the_notice_with_calls_only_and_with_the_weight_0(tmp_path, capsys):
    function = {"name": "f", "arguments": {}}
    asked = {"role": "user", "content": "?"}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    file = as_rows(tmp_path / "calls.jsonl", [{"messages": [asked, called]}] * 6)
    for template, told in ((QWEN, 0), (QWEN.replace("<|im_end|>", "<|stop|>"), 1)):
        for lines in notices(file, with_template(template), tmp_path, capsys):
            assert ["No answer ends" in line for line in lines] == [True] * told
    # Only the last answer has an end.
    template = answers() + EOS
    for weights, told in (((1, 0), 1), ((0, 1), 0)):
        said = [{"role": "assistant", "content": "Yes.", "weight": weight} for weight in weights]
        rows = [{"messages": [asked, said[0], asked, said[1]]}] * 6
        file = as_rows(tmp_path / f"weights{told}.jsonl", rows)
        for lines in notices(file, chat_tokenizer(template), tmp_path, capsys):
            assert ["No answer ends" in line for line in lines] == [True] * told


def test_the_end_token_after_a_line_break_is_trained_and_the_next_turn_is_not(tmp_path):
    tokenizer = chat_tokenizer(None)
    file = conversations(tmp_path, turns=2)
    for end, trained in (("\n" + EOS, "\n" + EOS), ("\n", "")):
        tokenizer.chat_template = answers(end=end).replace("Q: ", "<|user|>")
        ids = ids_of(tokenized(file, tokenizer, tmp_path))
        wanted = [answer + trained for answer in ANSWERS for _ in range(2)]
        assert tokenizer.decode(ids[ids >= 0]) == "".join(wanted)


def test_tokens_of_an_answer_that_were_added_to_the_vocabulary_are_no_end(tmp_path):
    rows = [("user", "a fox?"), ("assistant", "the <b>dog</b>")]
    messages = [{"role": role, "content": content} for role, content in rows]
    file = as_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    for end, count in (("\n\n", 0), ("", 0), ("<|eot|>", 1)):
        tokenizer = chat_tokenizer(answers(end=end))
        assert tokenized(file, tokenizer, tmp_path)["splits"]["train"]["ended"] == count


def test_answers_that_are_cut_before_their_end(tmp_path, capsys):
    """One whole answer is enough; a pair is always followed by the end-of-text token."""
    rows = [{"prompt": "the fox", "completion": "jumps over the dog " * n} for n in (2, 30, 40)]
    file, tokenizer = as_rows(tmp_path / "pairs.jsonl", rows), tokenizer_of("gpt2")
    cached, _ = notices(file, tokenizer, tmp_path, capsys, "--validation_file", file)
    assert cached == []
    told = notices(file, tokenizer, tmp_path, capsys, "--seq_length", "8")
    assert all("--seq_length" in line for [line] in told)
    prepared = tokenized(file, tokenizer, tmp_path)
    for length, count in ((8, 0), (64, 1), (4096, 3)):
        data = parse_arguments([]).data
        _, facts = open_split(prepared, "train", data, Padding(length, 8))
        assert facts["trained_ends"] == count
    tokenizer.eos_token = None
    told = notices(file, tokenizer, tmp_path, capsys)
    assert all("eos_token" in line for [line] in told)


# ------------------------------------------------------------------------- tokens that begin a text


def that_begins(kind, token, end=""):
    """A tokenizer that puts a token before each text, and another one behind it if `end`."""
    from tokenizers import processors

    tokenizer = tokenizer_of(kind)
    tokenizer.add_special_tokens({"bos_token": token})
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (token, EOS)}
    added = processors.TemplateProcessing(f"{token} $A {end}".strip(), None, list(ids.items()))
    tokenizer.backend_tokenizer.post_processor = added
    assert tokenizer("a")["input_ids"][0] == ids[token]
    return tokenizer


@pytest.mark.parametrize("kind, end", [("gpt2", ""), ("llama2", ""), ("llama2", EOS)])
def test_every_text_begins_as_the_tokenizer_begins_it(tmp_path, kind, end):
    tokenizer = that_begins(kind, "<s>", end)
    start, eos = tokenizer.bos_token_id, tokenizer.eos_token_id

    def whole(text):
        ids = tokenizer(text)["input_ids"]
        return ids[: len(ids) - bool(end)]

    file = as_rows(tmp_path / "texts.jsonl", [{"text": text} for text in ["", *TEXTS]])
    first, *others = map(whole, TEXTS)
    ids = ids_of(tokenized(file, tokenizer, tmp_path)).tolist()
    assert ids == first + [token for other in others for token in (eos, *other)]
    assert prompt_of(TEXTS[0], tokenizer, True).ids == first
    pair = as_rows(tmp_path / "pairs.jsonl", [{"prompt": TEXTS[0], "completion": "jumps"}])
    ids = ids_of(tokenized(pair, tokenizer, tmp_path))
    assert (~ids[ids < 0]).tolist() == first and ids[-1] == eos
    chat = conversations(tmp_path)
    ids = ids_of(tokenized(chat, tokenizer, tmp_path))  # with the plain template
    assert ids[0] == ~start and (ids == ~start).sum() == 6
    assert prompt_of("the", tokenizer, True).ids.count(start) == 1
    tokenizer.chat_template = "{{ bos_token }}" + answers(end=EOS)
    ids = ids_of(tokenized(chat, tokenizer, tmp_path))
    assert ids[0] == ~start and (ids == ~start).sum() == 6


@pytest.mark.parametrize("begin", [None, "<s>", EOS])
def test_documents_of_a_stream_begin_as_those_of_the_cache(tmp_path, begin):
    tokenizer = that_begins("gpt2", begin) if begin else tokenizer_of("gpt2")
    rows = [{"text": f"{n} the quick brown fox jumps over {n}"} for n in range(40)]
    file = as_rows(tmp_path / "texts.jsonl", rows)
    stored = ids_of(tokenized(file, tokenizer, tmp_path)).tolist()
    tokens = [tokenizer(row["text"], add_special_tokens=False)["input_ids"] for row in rows]
    eos, start = [tokenizer.eos_token_id], [tokenizer.bos_token_id] if begin else []
    between = start if start == eos else eos + start  # one token that is both is there once
    expected = start + tokens[0] + [token for ids in tokens[1:] for token in between + ids]
    assert stored == expected
    flags = {"batch_size": 1, "shuffle_buffer": 1, "seq_length": 8, "max_steps": 400}
    stream = stream_of(file, tokenizer, **flags)
    steps = stream.step_batches(SimpleNamespace(type="cpu"))
    found = [token for _ in range(24) for token in next(steps).micro_batches[0][0][0].tolist()]
    stream.summary()
    assert found == expected[: len(found)]


def test_a_long_document_begins_once_and_the_cache_knows_how(tmp_path, monkeypatch):
    from distributed_training.data import document_tokenizer

    text = " ".join(TEXTS * 200) + "\n"
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.setattr(document_tokenizer, "PIECE_CHARACTERS", 1000)
    plain, begins = tokenizer_of("gpt2"), that_begins("gpt2", "<s>")
    ids = ids_of(tokenized(tmp_path / "text.txt", begins, tmp_path / "cache"))
    assert ids.tolist() == begins(text)["input_ids"]
    ids = ids_of(tokenized(tmp_path / "text.txt", plain, tmp_path / "cache"))
    assert ids.tolist() == plain(text)["input_ids"]


def test_a_checkpoint_of_a_version_that_began_documents_differently():
    """It is refused without --resume_force; other runs of that version continue."""
    saved = {"hard": {}, "soft": {"dataset": "a"}}
    same = {"hard": {}, "soft": saved["soft"] | {"document_start": None, "tokens_sha256": "b"}}
    refuse_other_run(saved, same, forced=False)
    begins = {"hard": {}, "soft": same["soft"] | {"document_start": [1]}}
    with pytest.raises(UserError, match=r"document_start.*--resume_force"):
        refuse_other_run(saved, begins, forced=False)
    refuse_other_run(saved, begins, forced=True)


# -------------------------------------------------------------------------------------------- gaps


@pytest.mark.parametrize(("number", "dtype"), [(1500, "uint16"), (70_000, "uint32")])
def test_a_gap_in_the_ids_of_added_tokens(number, dtype, tmp_path):
    """The largest id counts, and not the number of tokens."""
    tokenizer = with_gap(number)
    assert len(tokenizer) < number_of_ids(tokenizer) == number + 1
    (tmp_path / "text.txt").write_text("the <|far|> fox")
    prepared = tokenized(tmp_path / "text.txt", tokenizer, tmp_path / "cache")
    split = prepared["splits"]["train"]
    assert (split["dtype"], split["vocabulary"]) == (dtype, number + 1)
    assert number in ids_of(prepared)


def test_an_id_that_only_the_template_of_the_tokenizer_has():
    """A post-processor has its own ids, which no vocabulary confirms."""
    tokenizer = tokenizer_of("gpt2")
    special = [("<s>", number := len(tokenizer) + 5)]
    start = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = start
    assert number_of_ids(tokenizer) == number + 1


# ------------------------------------------------------------------------------------------- dates


def test_the_digest_of_the_tokens_follows_a_date_in_the_template(tmp_path, monkeypatch):
    from transformers.utils import chat_template_utils

    file, tokenizer = conversations(tmp_path), tokenizer_of("gpt2")
    tokenizer.chat_template = "Today: {{ strftime_now('%d %b %Y') }}\n" + answers(end=EOS)

    def digests(day, cache):
        now = datetime.datetime(2026, 11, day)
        fake = SimpleNamespace(now=lambda: now)
        monkeypatch.setattr(chat_template_utils, "datetime", fake)
        chat_template_utils._compile_jinja_template.cache_clear()
        split = tokenized(file, tokenizer, tmp_path / cache)["splits"]["train"]
        return split["sha256"], split["tokens_sha256"]

    first, again, later = digests(1, "a"), digests(1, "b"), digests(2, "c")
    assert first == again and first[0] == later[0] and first[1] != later[1]
    assert np.array_equal(digests(2, "a"), first)  # the tokens are in the cache
