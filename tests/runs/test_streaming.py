"""--streaming: every row once a pass, the same blocks on any number of ranks, and exact resumes."""

import itertools
import json
import threading
import time

import numpy as np
import pytest
import torch
from conftest import assert_close
from streams import stream_of
from tokenizer_zoo import tokenizer_of

from distributed_training.data import document_tokenizer
from distributed_training.errors import UserError

WORK = "--streaming --seq_length 32 --precision fp32 --max_steps 10 --shuffle_buffer 24".split()
WORK.append("--no_eval")
TWO = {"launcher": "torchrun", "ranks": 2}
CPU = torch.device("cpu")


def as_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(script, tmp_path):
    from pydoc_data.topics import topics

    rows = as_lines(tmp_path / "rows.jsonl", [{"text": topics[name]} for name in sorted(topics)])
    work = [*WORK, "--dataset", rows, "--batch_size", "2", "--dropout", "0.1"]
    whole = script(*work, "--save_every", "3", **TWO)
    checkpoint = whole.folder / "checkpoints" / "step-00000003"
    resumed = script(*work, "--no_export", "--resume", checkpoint, **TWO)
    assert resumed.losses == whole.losses[3:]


def test_the_same_blocks_on_any_number_of_ranks(script, text_file):
    work = [*WORK, "--dataset", text_file, "--no_export", "--dropout", "0"]
    one = script(*work, "--batch_size", "4")
    accumulated = "--gradient_accumulation_steps 2 --batch_size".split()
    split = script(*work, *accumulated, "1", "--strategy", "zero3", "--save_every", "5", **TWO)
    assert_close(split.losses, one.losses, 1e-4)
    assert len({round(loss, 3) for loss in one.losses}) > 8
    checkpoint = split.folder / "checkpoints" / "step-00000005"
    resumed = script(*work, *accumulated, "2", "--no_save", "--resume", checkpoint)
    assert_close(resumed.losses, one.losses[5:], 1e-4)


def test_each_row_once_in_a_pass_and_in_another_order(script, llama, tmp_path):
    """The weights do not move, so a row's loss is its name. Also: a resume in the second pass."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "then"]
    texts = [" ".join(words[: n % 10 + 2][:: 1 + n // 10]) for n in range(20)]
    rows = [{"prompt": "", "completion": text} for text in texts]
    work = ["--model", llama, "--dataset", as_lines(tmp_path / "rows.jsonl", rows)]
    work += "--seq_length 44 --lr 1e-30 --precision fp32 --no_export --batch_size 1".split()
    plain = script(*work, "--validation_file", tmp_path / "rows.jsonl")
    work += "--streaming --max_steps 40 --shuffle_buffer 5 --no_eval".split()
    streamed = script(*work, "--save_every", "1")
    losses = [round(loss, 4) for loss in streamed.losses]
    first, second = losses[:20], losses[20:]
    assert sorted(first) == sorted(second) == sorted(round(loss, 4) for loss in plain.losses)
    assert first != second and len(set(first)) > 15
    checkpoint = streamed.folder / "checkpoints" / "step-00000027"
    resumed = script(*work, "--resume", checkpoint)
    assert resumed.losses == streamed.losses[27:]
    # What was cut is counted once.
    assert resumed.results["dataset"] == streamed.results["dataset"]
    assert streamed.results["dataset"]["truncated"] == plain.results["dataset"]["truncated"] > 0


def blocks_of(stream, steps):
    """The sequences of so many steps, and the state after each."""
    found = []
    for step, _ in zip(stream.step_batches(CPU), range(steps), strict=False):
        blocks = torch.cat([inputs for inputs, _, _ in step.micro_batches]).tolist()
        found.append((blocks, json.loads(json.dumps(stream.progress()))))
    stream.summary()
    return found


def one_rank(dataset, tokenizer, slots, **flags):
    flags = {"batch_size": slots, "shuffle_buffer": 1, "max_steps": 1000, **flags}
    return stream_of(dataset, tokenizer, **flags)


@pytest.fixture(scope="module")
def long_texts(tmp_path_factory):
    """A folder with two long text files and two long rows, and the texts in order."""
    from pydoc_data.topics import topics

    texts = [topics[name][:9000] for name in ("assignment", "compound", "exprlists", "integers")]
    folder = tmp_path_factory.mktemp("texts")
    (folder / "0.txt").write_text(texts[0])
    as_lines(folder / "1.jsonl", [{"text": text} for text in texts[1:3]])
    (folder / "2.txt").write_text(texts[3])
    return folder, texts


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_the_tokens_are_those_of_the_whole_texts(long_texts, kind, monkeypatch):
    """One slot: exactly the stream that the cache holds."""
    monkeypatch.setattr(document_tokenizer, "PIECE_CHARACTERS", 1000)
    folder, texts = long_texts
    tokenizer = tokenizer_of(kind)
    end, stream = tokenizer.eos_token_id, []
    for text in texts:
        stream += [end] * bool(stream) + tokenizer(text, add_special_tokens=False)["input_ids"]
    steps = len(stream) // 16
    one = blocks_of(one_rank(folder, tokenizer, 1), steps)
    assert [block for [block], _ in one] == np.reshape(stream[: steps * 16], (steps, 16)).tolist()


def test_resume_within_a_text_file(long_texts, monkeypatch):
    """After some of the steps, in the first pass and in the next ones: the same blocks follow."""
    monkeypatch.setattr(document_tokenizer, "PIECE_CHARACTERS", 1000)
    folder, _ = long_texts
    tokenizer = tokenizer_of("gpt2")
    steps = blocks_of(one_rank(folder, tokenizer, 3), 250)
    state = steps[-1][1]
    assert max(slot["reader"]["pass"] for slot in state["lanes"].values()) >= 1
    for step in [*range(0, 60, 7), 199, 230]:
        resumed = one_rank(folder, tokenizer, 3)
        resumed.resume(steps[step][1])
        following = [blocks for blocks, _ in blocks_of(resumed, 15)]
        assert following == [blocks for blocks, _ in steps[step + 1 : step + 16]]
    for slots, wrong in ((2, state), (3, {**state, "version": 2}), (3, None)):
        with pytest.raises(UserError, match="another global batch size"):
            one_rank(folder, tokenizer, slots).resume(wrong)


@pytest.mark.slow
def test_a_corpus_on_the_hub(script, hub, tmp_path):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path}
    work = [*WORK, "--dataset", "wikitext", "--no_export"]  # a document is an article
    run = script(*work, "--batch_size", "2", "--save_every", "5", env=env, **TWO)
    assert len(run.losses) == 10 and run.losses[-1] < run.losses[0]
    checkpoint = run.folder / "checkpoints" / "step-00000005"
    resumed = script(*work, "--batch_size", "4", "--resume", checkpoint, env=env)
    assert_close(resumed.losses, run.losses[5:], 1e-4)


@pytest.mark.parametrize("usable", [8, 0])
def test_rows_of_which_nothing_can_be_used(tmp_path, usable):
    """The target is behind the first --seq_length tokens; a slot may get only such rows."""
    long = "the quick brown fox " * 20
    pairs = [("fox", "dog")] * usable + [(long, "dog")] * (16 - usable)
    rows = [{"prompt": prompt, "completion": text} for prompt, text in pairs]
    stream = one_rank(as_lines(tmp_path / "rows.jsonl", rows), tokenizer_of("gpt2"), 4)
    if usable:
        assert len(blocks_of(stream, 8)) == 8 and stream.summary()["skipped"] == 8
    else:
        with pytest.raises(UserError, match="no row of the corpus can be used"):
            blocks_of(stream, 1)


# ------------------------------------------------------------------- the thread that reads ahead


def test_steps_are_read_ahead_in_their_order_and_an_error_comes_where_its_step_would():
    from distributed_training.data.streaming import read_ahead

    read = []

    def numbers():
        for number in itertools.count():
            read.append(threading.current_thread())
            if number == 12:
                raise UserError("row 12")
            yield number

    ahead = read_ahead(numbers(), 4)
    assert not read  # before anything is wanted, it may be resumed
    assert next(ahead) == 0
    time.sleep(0.5)
    assert len(read) == 5 and threading.current_thread() not in read
    assert [next(ahead) for _ in range(11)] == list(range(1, 12))
    with pytest.raises(UserError, match="row 12"):
        next(ahead)


def test_what_was_only_read_is_not_in_a_checkpoint(tmp_path, capsys):
    """A row that cannot be used is read ahead: it is said, and saved, where it is trained past."""
    rows = [json.dumps({"text": f"number {n} " * 12}) for n in range(60)]
    rows[20] = "{"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tokenizer = tokenizer_of("gpt2")
    stream = stream_of(tmp_path / "rows.jsonl", tokenizer)
    steps = blocks_of(stream, 50)
    first = next(step for step, (_, place) in enumerate(steps) if place["bad"])
    assert 5 < first < 45 and len(steps[-1][1]["bad"]) == 1
    assert capsys.readouterr().out.count("Left out") == 1
    for step in (0, first - 1, first):
        resumed = stream_of(tmp_path / "rows.jsonl", tokenizer)
        resumed.resume(steps[step][1])
        following = [blocks for blocks, _ in blocks_of(resumed, 4)]
        assert following == [blocks for blocks, _ in steps[step + 1 : step + 5]]
        assert capsys.readouterr().out.count("Left out") == (step == first - 1)
    assert stream.summary()["bad_rows"] == steps[-1][1]["bad"]
    with pytest.raises(UserError, match="--max_bad_rows"):
        blocks_of(stream_of(tmp_path / "rows.jsonl", tokenizer, max_bad_rows=0), 50)


def test_positions_of_a_stream_restart_where_a_document_begins(tmp_path):
    rows, tokenizer = [{"text": "word " * 9}] * 9, tokenizer_of("gpt2")
    file = as_lines(tmp_path / "rows.jsonl", rows)
    stream = stream_of(file, tokenizer, isolate_documents=True)
    inputs, labels, positions = next(stream.step_batches(CPU)).micro_batches[0]
    stream.summary()
    begins = (inputs == tokenizer.eos_token_id).roll(1, 1)
    begins[:, 0] = True
    assert torch.equal(positions == 0, begins) and torch.equal(labels == -100, begins)
    assert begins[:, 1:].any() and positions.diff()[~begins[:, 1:]].eq(1).all()
