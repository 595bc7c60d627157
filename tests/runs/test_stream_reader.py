"""Reading a stream: the order, the thread that reads ahead, and resumes."""

import itertools
import json
import threading
import time

import pytest
import torch
from streams import stream_of
from tokenizer_zoo import tokenizer_of

from support.errors import UserError


def wait_until(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def ahead_of(error_at=None):
    """(numbers from 0 that a thread reads up to 4 ahead, the threads that read them)."""
    from support.data.batches import read_ahead

    read = []

    def numbers():
        for number in itertools.count():
            read.append(threading.current_thread())
            if number == error_at:
                raise UserError(f"row {number}")
            yield number

    return read_ahead(numbers(), 4), read


def test_steps_are_read_ahead_in_their_order():
    ahead, read = ahead_of()
    assert not read  # before anything is wanted, it may be resumed
    assert next(ahead) == 0
    wait_until(lambda: len(read) == 5)  # 4 wait
    time.sleep(0.3)
    assert len(read) == 5 and threading.current_thread() not in read
    assert [next(ahead) for _ in range(9)] == list(range(1, 10))
    ahead.close()
    count = len(read)
    assert next(ahead, "the end") == "the end" and len(read) == count
    wait_until(lambda: not read[0].is_alive())


def test_an_error_comes_where_its_step_would():
    ahead, read = ahead_of(error_at=2)
    assert next(ahead) == 0
    wait_until(lambda: len(read) == 3)  # the thread has failed
    assert next(ahead) == 1
    with pytest.raises(UserError, match="row 2"):
        next(ahead)
    assert next(ahead, "the end") == "the end"


def test_the_thread_has_a_tokenizer_of_its_own(tmp_path, monkeypatch):
    """Conversations without a template: the run's tokenizer gets one, and says so, where it is
    trained.
    """
    messages = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    tokenizer, used, threads = tokenizer_of("gpt2"), [], []
    encode = type(tokenizer)._encode_plus
    monkeypatch.setattr(
        type(tokenizer),
        "_encode_plus",
        lambda self, *a, **k: used.append(self) or encode(self, *a, **k),
    )
    stream, _ = stream_of(tmp_path / "chat.jsonl", tokenizer, seq_length=64)
    stream.ctx.console.warn = lambda text: threads.append(threading.current_thread())
    step_batches = stream.step_batches(torch.device("cpu"))
    next(step_batches), next(step_batches)
    assert used and all(one is not tokenizer for one in used)
    assert tokenizer.chat_template and threads == [threading.current_thread()]
    stream._ahead.close()


def test_what_was_only_read_is_not_in_a_checkpoint(tmp_path):
    """A row that cannot be used is read ahead: it is said, and saved, where it is trained past."""
    rows = [json.dumps({"text": f"number {n} " * 12}) for n in range(60)]
    rows[20] = "{"
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tokenizer, cpu = tokenizer_of("gpt2"), torch.device("cpu")
    stream, said = stream_of(tmp_path / "rows.jsonl", tokenizer)
    blocks, places = [], []
    for step_batch in stream.step_batches(cpu):
        blocks.append(step_batch.batches[0][0].tolist())
        saved = json.loads(json.dumps(stream.progress()))
        time.sleep(0.01)  # the thread reads on
        assert json.loads(json.dumps(stream.progress())) == saved
        places.append(saved)
        if len(blocks) == 50:
            break
    first = next(step for step, place in enumerate(places) if place["bad"])
    assert (
        5 < first < 45
        and len(places[-1]["bad"]) == 1
        and sum("Left out" in line for line in said) == 1
    )
    for step in (0, first - 1, first):
        resumed, said = stream_of(tmp_path / "rows.jsonl", tokenizer)
        resumed.resume(places[step])
        following = [next(resumed.step_batches(cpu)).batches[0][0].tolist() for _ in range(4)]
        assert following == blocks[step + 1 : step + 5]
        assert sum("Left out" in line for line in said) == (step == first - 1)
        resumed.summary()
    assert stream.summary()["bad_rows"] == places[-1]["bad"]


def test_too_many_bad_rows_end_the_run_from_the_thread(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "word " * 200}) + "\n{\n" * 9)
    stream, _ = stream_of(tmp_path / "rows.jsonl", tokenizer_of("gpt2"), max_bad_rows=3)
    with pytest.raises(UserError, match="--max_bad_rows"):
        for _ in stream.step_batches(torch.device("cpu")):
            pass


def test_positions_of_a_stream_restart_where_a_document_begins(tmp_path):
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "word " * 9}) + "\n") * 9)
    tokenizer = tokenizer_of("gpt2")
    stream, _ = stream_of(tmp_path / "rows.jsonl", tokenizer, isolate_documents=True)
    inputs, labels, positions = next(stream.step_batches(torch.device("cpu"))).batches[0]
    stream.summary()
    begins = (inputs == tokenizer.eos_token_id).roll(1, 1)
    begins[:, 0] = True
    assert torch.equal(positions == 0, begins) and torch.equal(labels == -100, begins)
    assert begins[:, 1:].any() and positions.diff()[~begins[:, 1:]].eq(1).all()
