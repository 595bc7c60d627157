"""--streaming: every row once a pass, the same blocks on any number of ranks, and exact resumes."""

import json

import numpy as np
import pytest
import torch
from conftest import assert_close
from streams import stream_of
from tokenizer_zoo import tokenizer_of

from support.data import tokenize
from support.data.formats import Document
from support.data.rows import join_articles
from support.errors import UserError

WORK = [
    *"--streaming --seq_length 32 --precision fp32 --max_steps 10 --shuffle_buffer 24".split(),
    *"--no_eval".split(),
]
TWO = {"launcher": "torchrun", "ranks": 2}


@pytest.fixture(scope="module")
def topic_rows(tmp_path_factory):
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)))
    return path


@pytest.fixture(scope="module")
def whole(script, topic_rows):
    return script(
        *WORK,
        *("--dataset", topic_rows),
        *"--batch_size 2 --dropout 0.1 --save_every 3".split(),
        **TWO,
    )


def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(script, topic_rows, whole):
    for step in (3, 9):
        resumed = script(
            *WORK,
            *("--dataset", topic_rows),
            *"--batch_size 2 --dropout 0.1 --no_export --resume".split(),
            whole.folder / "checkpoints" / f"step-{step:08d}",
            **TWO,
        )
        assert resumed.losses == whole.losses[step:]


def test_the_same_blocks_on_any_number_of_ranks(script, text_file):
    work = [*WORK, "--dataset", text_file, "--no_export", "--dropout", "0"]
    one = script(*work, "--batch_size", "4")
    split = script(
        *work,
        *"--batch_size 1 --gradient_accumulation_steps 2 --strategy zero3 --save_every 5".split(),
        **TWO,
    )
    assert_close(split.losses, one.losses, 1e-4)
    assert len({round(loss, 3) for loss in one.losses}) > 8
    resumed = script(
        *work,
        *"--batch_size 2 --gradient_accumulation_steps 2 --no_save --resume".split(),
        split.folder / "checkpoints" / "step-00000005",
    )
    assert_close(resumed.losses, one.losses[5:], 1e-4)


def test_each_row_once_in_a_pass_and_in_another_order(script, llama, tmp_path):
    """The weights do not move, so a row's loss is its name. Also: a resume in the second pass."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then"]
    rows = [
        {"prompt": "", "completion": " ".join(words[: n % 10 + 2][:: 1 + n // 10])}
        for n in range(20)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    work = [
        *("--model", llama, "--dataset", path),
        *"--seq_length 44 --lr 1e-30 --precision fp32 --no_eval --no_export --batch_size".split(),
        *"1".split(),
    ]
    plain = script(*work, "--validation_file", path)
    streamed = script(
        *work, "--streaming", "--max_steps", "40", "--shuffle_buffer", "5", "--save_every", "1"
    )
    first, second = (
        [round(loss, 4) for loss in streamed.losses[half]] for half in (slice(20), slice(20, 40))
    )
    assert sorted(first) == sorted(second) == sorted(round(loss, 4) for loss in plain.losses)
    assert first != second and len(set(first)) > 15
    for step in (8, 27):
        resumed = script(
            *work,
            *"--streaming --max_steps 40 --shuffle_buffer 5 --resume".split(),
            streamed.folder / "checkpoints" / f"step-{step:08d}",
        )
        assert resumed.losses == streamed.losses[step:]
        assert (
            resumed.results["dataset"] == streamed.results["dataset"]
        )  # what was cut is counted once
    assert streamed.results["dataset"]["truncated"] == plain.results["dataset"]["truncated"] > 0


def blocks_of(stream, steps):
    """The sequences of so many steps, and the state after each."""
    found = []
    for step, _ in zip(stream.step_batches(torch.device("cpu")), range(steps), strict=False):
        blocks = torch.cat([inputs for inputs, _, _ in step.batches]).tolist()
        found.append((blocks, json.loads(json.dumps(stream.progress()))))
    stream._ahead.close()
    return found


def one_rank(dataset, tokenizer, slots, **flags):
    flags = {"batch_size": slots, "shuffle_buffer": 1, "max_steps": 1000, **flags}
    return stream_of(dataset, tokenizer, **flags)[0]


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """A folder with two long text files and a long row, and the texts in order."""
    from pydoc_data.topics import topics

    texts = [topics[name][:9000] for name in ("assignment", "compound", "exprlists", "integers")]
    folder = tmp_path_factory.mktemp("texts")
    (folder / "0.txt").write_text(texts[0])
    (folder / "1.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[1:3])
    )
    (folder / "2.txt").write_text(texts[3])
    return folder, texts


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_the_tokens_are_those_of_the_whole_texts(long_texts, kind, monkeypatch):
    """One slot: exactly the stream that the cache holds. Three slots: a share of each text."""
    monkeypatch.setattr(tokenize, "PIECE_CHARACTERS", 1000)
    folder, texts = long_texts
    tokenizer = tokenizer_of(kind)
    end, stream = tokenizer.eos_token_id, []
    for text in texts:
        stream += [end] * bool(stream) + tokenizer(text, add_special_tokens=False)["input_ids"]
    steps = len(stream) // 16
    one = blocks_of(one_rank(folder, tokenizer, 1), steps)
    assert [block for [block], _ in one] == np.reshape(stream[: steps * 16], (steps, 16)).tolist()
    three = one_rank(folder, tokenizer, 3)
    units = [next(three.units) for _ in range(40)]
    assert {unit.slot for unit in units[:9]} == {0, 1, 2} and units[3].piece
    first = [unit.piece.text for unit in units if unit.piece and unit.state["rows"]["file"] == 0]
    assert "".join(first).startswith(texts[0]) and len(first) > 5


def test_resume_within_a_text_file(long_texts, monkeypatch):
    """After some of the steps, in the first pass and in the next ones: the same blocks follow."""
    monkeypatch.setattr(tokenize, "PIECE_CHARACTERS", 1000)
    folder, _ = long_texts
    tokenizer = tokenizer_of("gpt2")
    steps = blocks_of(one_rank(folder, tokenizer, 3), 250)
    assert max(slot["reader"]["pass"] for slot in steps[-1][1]["lanes"].values()) >= 1
    for step in [*range(0, 60, 7), 199, 230]:
        resumed = one_rank(folder, tokenizer, 3)
        resumed.resume(steps[step][1])
        following = [blocks for blocks, _ in blocks_of(resumed, 15)]
        assert following == [blocks for blocks, _ in steps[step + 1 : step + 16]]


def test_lines_of_an_article_are_one_document():
    articles = []
    for n in range(9):
        lines = [f" = Title {n} = \n", " \n", *[f" The text {n} , and more . \n", " \n"] * 6]
        articles.append([*lines, " = = Section = = \n"])
    lines = [line for article in articles for line in article]
    rows = [({"row": n}, Document(f"row {n}", [line])) for n, line in enumerate(lines)]
    joined = list(join_articles(iter(rows)))
    assert [document.pieces for _, document in joined] == articles
    assert [position["row"] for position, _ in joined] == list(range(0, len(lines), 15))


@pytest.mark.slow
def test_a_corpus_on_the_hub(script, hub, tmp_path):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path}
    work = [
        *WORK,
        *"--dataset wikitext --no_export".split(),
    ]  # its rows are lines, and a document is an article
    run = script(*work, "--batch_size", "2", "--save_every", "5", env=env, **TWO)
    assert len(run.losses) == 10 and run.losses[-1] < run.losses[0]
    resumed = script(
        *work,
        *"--batch_size 4 --resume".split(),
        run.folder / "checkpoints" / "step-00000005",
        env=env,
    )
    assert_close(resumed.losses, run.losses[5:], 1e-4)


def test_a_position_of_another_stream_is_refused(long_texts):
    folder, tokenizer = long_texts[0], tokenizer_of("gpt2")
    [*_, (_, state)] = blocks_of(one_rank(folder, tokenizer, 3), 2)
    for slots, wrong in ((2, state), (3, {**state, "version": 2}), (3, None)):
        with pytest.raises(UserError, match="another global batch size"):
            one_rank(folder, tokenizer, slots).resume(wrong)


@pytest.mark.parametrize("usable", [8, 0])
def test_rows_of_which_nothing_can_be_used(tmp_path, usable):
    """The target is behind the first --seq_length tokens; a slot may get only such rows."""
    long, path = "the quick brown fox " * 20, tmp_path / "rows.jsonl"
    pairs = [("fox", "dog")] * usable + [(long, "dog")] * (16 - usable)
    rows = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in pairs]
    path.write_text("\n".join(rows))
    stream = one_rank(path, tokenizer_of("gpt2"), 4)
    if usable:
        assert len(blocks_of(stream, 8)) == 8 and stream.summary()["skipped"] == 8
    else:
        with pytest.raises(UserError, match="no row of the corpus can be used"):
            blocks_of(stream, 1)
