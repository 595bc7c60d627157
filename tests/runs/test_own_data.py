"""The user's own rows: what is learned of them, which cannot be used, and what is held out."""

import json
import re

import numpy as np
import pytest

# A chat template with the tokenizer's only special token at the end of a turn, and the same with
# marks of its own.
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}GENERATION{{ m['content'] + eos_token }}END"
    "{% else %}{{ m['content'] | trim }}{% endif %}{{ '\n' }}{% endfor %}"
)
MARKED = TEMPLATE.replace("GENERATION", "{% generation %}").replace("END", "{% endgeneration %}")
PLAIN = TEMPLATE.replace("GENERATION", "").replace("END", "")
CHATS = [
    [("system", "Be short."), ("user", "The quick brown fox?"), ("assistant", "It jumps over.")],
    [
        *[("user", " the dog "), ("assistant", "lazy\n\ndog.")],
        *[("user", "Why?"), ("assistant", "over the lazy dog")],
    ],
    [("user", "over?"), ("assistant", "over?"), ("user", "over?"), ("assistant", "fox, é 猫")],
]
TEXTS = [  # what the template makes of them; what is learned stands between < and >
    "[system]\nBe short.\n[user]\nThe quick brown fox?\n[assistant]\n<It jumps over.<|end|>>\n",
    "[user]\nthe dog\n[assistant]\n<lazy\n\ndog.<|end|>>\n[user]\nWhy?\n[assistant]\n<over the lazy dog<|end|>>\n",
    "[user]\nover?\n[assistant]\n<over?<|end|>>\n[user]\nover?\n[assistant]\n<fox, é 猫<|end|>>\n",
]
PAIRS = [("the quick ", "brown fox"), ("", "lazy dog"), ("jumps over", " the lazy dog")]
# At this rate the weights do not move. All rows in one batch, in one step.
STILL = "--batch_size 3 --lr 1e-30 --precision fp32 --no_export --max_steps 1".split()
SHORT = "--seq_length 32 --batch_size 4 --precision fp32".split()


def as_lines(path, rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def chat(turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def cached(folder, split="train"):
    """(ids, learned) of each example in a cache."""
    [stored] = folder.glob(f"*/{split}.bin")
    tokens = np.fromfile(stored, dtype="int32")
    index = np.fromfile(stored.with_name(f"{split}.index.bin"), dtype=np.int64).reshape(-1, 4)
    rows = [tokens[start:end] for start, end, _, _ in index]
    first_targets = [np.flatnonzero(row[1:] >= 0)[0] + 1 for row in rows]
    assert first_targets == (index[:, 2] - index[:, 0]).tolist()
    ids = [np.where(row < 0, ~row, row).tolist() for row in rows]
    return [(one, (row >= 0).astype(int).tolist()) for one, row in zip(ids, rows, strict=True)]


def expected(tokenizer, text):
    """Ids and mask, token by token: each token's characters are looked up in the learned ones."""
    text = text.replace("<|end|>", "\0")
    flags, plain, inside = [], "", False
    for character in text:
        if character in "<>":
            inside = character == "<"
            continue
        piece = "<|end|>" if character == "\0" else character
        plain += piece
        flags += [inside] * len(piece)
    found = tokenizer(plain, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(flags[start:end])) for start, end in found["offset_mapping"]]
    return found["input_ids"], mask


def loss_of(model, rows):
    """What transformers and PyTorch make of rows of (ids, mask): the mean over all tokens that are
    learned.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids, mask in rows:
        with torch.no_grad():
            logs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for position in range(1, len(ids)):
            if mask[position]:
                total, count = total - logs[position - 1, ids[position]].item(), count + 1
    return total / count


@pytest.fixture(scope="module")
def tokenizer(llama):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(llama)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["found", "marked"])
def test_only_the_assistants_tokens_are_learned(script, llama, tokenizer, tmp_path, template):
    file, cache = as_lines(tmp_path / "chat.jsonl", map(chat, CHATS)), tmp_path / "cache"
    (tmp_path / "template.jinja").write_text(template)
    work = ["--model", llama, "--dataset", file, "--validation_file", file, "--cache_dir", cache]
    work += ["--chat_template", tmp_path / "template.jinja", "--seq_length", "128", *STILL]
    run = script(*work)
    wanted = [expected(tokenizer, text) for text in TEXTS]
    assert cached(cache) == cached(cache, "validation") == wanted
    assert 0 < sum(sum(mask) for _, mask in wanted) < sum(len(ids) for ids, _ in wanted) / 2
    assert run.losses[0] == pytest.approx(loss_of(llama, wanted), rel=1e-4)
    assert run.results["eval_loss"] == pytest.approx(run.losses[0], rel=1e-5)
    # What fills up the blocks is not counted.
    assert run.results["tokens"] == sum(len(ids) for ids, _ in wanted)


# The sequences of the small model are short, so the template writes only the names of the tools.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['function']['name'] + '\n' }}{% endfor %}"
    "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}"
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] %}"
    "(call){{ call['function']['arguments'] | tojson }}{{ call['function']['name'] }}{% endfor %}"
    "{{ eos_token }}{% else %}{{ m['content'] | trim }}{% endif %}{{ '\n' }}{% endfor %}"
)
TOOL_TEXTS = [
    'find\n[user]\nThe fox?\n[assistant]\n<(call){"it": "fox"}find<|end|>>\n[tool]\nlazy\n'
    "[assistant]\n<It jumps over.<|end|>>\n",
    "[user]\nfox?\n[assistant]\nthe dog<|end|>\n[user]\nfox?\n[assistant]\n<the dog<|end|>>\n",
]


def tool_rows(arguments='{"it": "fox"}'):
    """The rows of TOOL_TEXTS."""
    calls = [{"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    turns = [("user", "The fox?"), ("tool", "lazy"), ("assistant", "It jumps over.")]
    [asked, result, said] = chat(turns)["messages"]
    repeated = chat([("user", "fox?"), ("assistant", "the dog")] * 2)
    repeated["messages"][1]["weight"] = 0
    tools = json.dumps([{"name": "find", "parameters": {}}])
    return [{"messages": [asked, called, result, said], "tools": tools}, repeated]


def test_tool_calls_and_weights(script, llama, tokenizer, tmp_path):
    """Only the calls and the answers are learned, but none with the weight 0; a bad call ends."""
    file, cache = as_lines(tmp_path / "chat.jsonl", tool_rows()), tmp_path / "cache"
    (tmp_path / "template.jinja").write_text(TOOL_TEMPLATE)
    work = ["--model", llama, "--chat_template", tmp_path / "template.jinja", *STILL]
    work += ["--seq_length", "128", "--cache_dir", cache, "--dataset"]
    run = script(*work, file, "--batch_size", "2", "--validation_file", file)
    wanted = [expected(tokenizer, text) for text in TOOL_TEXTS]
    assert cached(cache) == cached(cache, "validation") == wanted
    assert all(len(ids) <= 128 for ids, _ in wanted)
    assert run.losses[0] == pytest.approx(loss_of(llama, wanted), rel=1e-4)
    bad = as_lines(tmp_path / "bad.jsonl", tool_rows(arguments="the dog"))
    run = script(*work, bad, "--batch_size", "2", ok=False)
    assert run.code == 2 and f"{bad}, line 1: " in run.error and "'arguments'" in run.error
    assert "Traceback" not in run.out + run.error


def test_all_tokens_are_learned(script, llama, tokenizer, tmp_path):
    """With --train_on all. A resume with another value is refused."""
    file, out = as_lines(tmp_path / "chat.jsonl", map(chat, CHATS)), tmp_path / "out"
    (tmp_path / "template.jinja").write_text(PLAIN)
    work = ["--model", llama, "--chat_template", tmp_path / "template.jinja", *STILL, "--dataset"]
    work += [file, "--validation_file", file, "--seq_length", "128", "--output_dir", out]
    run = script(*work, "--train_on", "all", "--save_every", "1", folder=out)
    ids = [expected(tokenizer, text)[0] for text in TEXTS]
    everything = [(one, [1] * len(one)) for one in ids]
    assert run.losses[0] == pytest.approx(loss_of(llama, everything), rel=1e-4)
    run = script(*work, "--max_steps", "2", "--resume", folder=out, ok=False)
    assert run.code == 2 and "train_on all in the checkpoint, assistant in this run" in run.error


def test_a_conversation_without_a_template_gets_a_plain_one(script, tmp_path):
    file = as_lines(tmp_path / "chat.jsonl", [chat(turns) for turns in CHATS])
    flags = "--seq_length 128 --batch_size 2 --max_steps 1 --no_eval --generate".split()
    run = script("--dataset", file, *flags, "What jumps?")
    assert "no chat template" in run.out and "--validation_split 0" in run.out
    answer = run.results["sample"]  # without the prompt and its headings
    assert answer and "What jumps?" not in answer and "###" not in answer[:20]
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(run.folder / "hf")
    text = exported.apply_chat_template(chat(CHATS[0])["messages"], tokenize=False)
    assert "### User:\nThe quick brown fox?" in text
    assert f"It jumps over.{exported.eos_token}" in text


def test_only_completions_are_learned(script, llama, tokenizer, tmp_path):
    file = as_lines(tmp_path / "pairs.jsonl", [{"prompt": p, "completion": c} for p, c in PAIRS])
    work = ["--model", llama, "--dataset", file, "--validation_file", file, "--seq_length", "64"]
    run = script(*work, *STILL)
    rows = []
    for pair in PAIRS:
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in pair)
        mask = [0] * len(before) + [1] * (len(after) + 1)
        rows.append((before + after + [tokenizer.eos_token_id], mask))
    assert run.losses[0] == pytest.approx(loss_of(llama, rows), rel=1e-4)


def test_rows_as_other_programs_write_them(script, llama, tmp_path):
    """The same conversations in five formats, in one file, from the cache and from a stream."""
    said = [("user", "the fox?"), ("assistant", "over the dog")]
    system = {"role": "system", "content": "Be short."}
    [prompt, completion] = chat(said)["messages"]
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox?"}]
    turns = [("system", "Be short."), ("human", "the fox?"), ("gpt", "over the dog")]
    rows = [
        {"instruction": "the fox?", "input": "", "output": "over the dog", "system": "Be short."},
        {"conversations": [{"from": role, "value": text} for role, text in turns]},
        {"prompt": [system, prompt], "completion": [completion]},
        {"messages": [system, {"role": "user", "content": parts}, completion]},
    ]
    (tmp_path / "template.jinja").write_text(PLAIN)
    work = ["--model", llama, "--chat_template", tmp_path / "template.jinja", "--no_eval"]
    work += ["--seq_length", "128", *STILL, "--dataset"]
    plain = script(*work, as_lines(tmp_path / "plain.jsonl", [rows[3]] * 4))
    rows = as_lines(tmp_path / "rows.jsonl", rows)
    cached, streamed = script(*work, rows), script(*work, rows, "--streaming")
    assert cached.losses == plain.losses and cached.results["tokens"] == plain.results["tokens"]
    assert streamed.losses == pytest.approx(plain.losses, rel=1e-6)
    formats = cached.results["dataset"]["formats"]
    assert len(formats) == 4 and sorted(streamed.results["dataset"]["formats"]) == sorted(formats)
    for run in (cached, streamed):
        assert all(name in run.out for name in formats)


def test_show_sample_marks_the_trained_tokens(script, llama, tokenizer, tmp_path):
    """It trains nothing and writes no results; also under a launcher."""
    (tmp_path / "template.jinja").write_text(PLAIN)
    file = as_lines(tmp_path / "chat.jsonl", [chat(turns) for turns in CHATS * 4])
    work = ["--model", llama, "--chat_template", tmp_path / "template.jinja", "--dataset", file]
    work += ["--seq_length", "128", "--show_sample"]
    ids, mask = expected(tokenizer, TEXTS[0])
    run = script(*work, launcher="torchrun", ranks=2)
    lines = re.findall(r"^ +\d+ +(\d+) ([* ]) '.*'$", run.out, re.MULTILINE)
    assert [int(token) for token, _ in lines] == ids
    assert [mark == "*" for _, mark in lines] == [bool(one) for one in mask]
    assert not run.folder.exists()


def test_bad_rows_are_named_and_counted(script, llama, tmp_path):
    pair = {"prompt": "the quick ", "completion": "brown fox"}
    rows = [pair, '{"prompt": "no end', pair, {"prompt": "nothing", "completion": ""}]
    rows += [{"text": "of another kind"}, pair, {"prompt": 3, "completion": "x"}, *[pair] * 6]
    file = as_lines(tmp_path / "rows.jsonl", rows)
    work = ["--model", llama, "--dataset", file]
    work += "--seq_length 32 --batch_size 2 --max_steps 1 --no_eval".split()
    refused = script(*work, ok=False)
    assert refused.code == 2 and f"{file}, line 2: not valid JSON" in refused.error
    run = script(*work, "--max_bad_rows", "4")
    found = run.results["dataset"]
    lines = [int(re.search(r"line (\d+)", row)[1]) for row in found["bad_rows"]]
    assert sorted(lines) == [2, 4, 5, 7]
    assert all(row in run.out for row in found["bad_rows"]) and found["rows"] == 9
    # The cache was written when more were allowed.
    refused = script(*work, "--max_bad_rows", "3", ok=False)
    assert refused.code == 2 and "--max_bad_rows" in refused.error


def test_validation_file_and_split(script, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(text_file.read_text()[1000:9000])
    work = ["--dataset", text_file, "--max_steps", "2", *SHORT]
    all_of_it = script(*work, "--validation_file", other)
    part = script(*work, "--validation_split", "0.25", "--no_export", "--eval_samples", "8")
    blocks = all_of_it.results["dataset"]["blocks"]
    assert part.results["dataset"]["validation"]["blocks"] == int(0.25 * blocks)
    assert part.results["dataset"]["blocks"] == blocks - int(0.25 * blocks)


def test_a_broken_chat_template_ends_the_run_and_gives_its_folder_back(script, llama, tmp_path):
    """Whatever --max_bad_rows says. The folder of a run that never began may be used again."""
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}{{ m }")
    work = ["--model", llama, "--dataset", as_lines(tmp_path / "chat.jsonl", [chat(CHATS[0])])]
    work += ["--chat_template", tmp_path / "broken.jinja", "--output_dir", tmp_path / "out"]
    for _ in range(2):
        run = script(*work, "--max_bad_rows", "9", "--seq_length", "16", ok=False)
        assert run.code == 2 and "chat template cannot be read" in run.error
