"""From files to blocks: every format, one cache, one order."""

import csv
import hashlib
import json
from pydoc_data.topics import topics

import pytest
from streams import ids_of, tokenized
from tokenizer_zoo import tokenizer_of

TEXTS = ["the quick brown fox " * 40, "jumps over \n\nthe lazy dog " * 50, "anémone 猫 " * 30]


def write(folder, kind):
    """The same three documents in each format."""
    path = folder / f"corpus.{kind}"
    rows = [{"body": text} for text in TEXTS]
    if kind == "jsonl":
        path.write_text("\n\n".join(map(json.dumps, rows)))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([["id", "body"], *enumerate(TEXTS)])
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"id": [0, 1, 2], "body": TEXTS}), path)
    elif kind == "folder":
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number}.md").write_bytes(text.encode())
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_every_format_gives_the_same_stream(tmp_path, kind):
    """The documents, with an end-of-text token between them."""
    tokenizer = tokenizer_of("gpt2")
    prepared = tokenized(
        write(tmp_path, kind), tokenizer, tmp_path / "cache", "--text_column", "body"
    )
    tokens, end = ids_of(prepared).tolist(), tokenizer.eos_token_id
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert tokens == [*encoded[0], end, *encoded[1], end, *encoded[2]]


def test_tokenised_once_for_every_length_and_again_when_the_text_changes(
    script, llama, tmp_path, text_file
):
    cache, copy = tmp_path / "cache", tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())

    def files():
        return {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}

    common = ["--model", llama, "--dataset", copy, "--cache_dir", cache]
    common += "--max_steps 1 --no_eval --no_export".split()
    first = script(*common, "--seq_length", "32")
    written = files()
    second = script(*common, "--seq_length", "64")
    assert files() == written
    assert second.results["dataset"]["sha256"] == first.results["dataset"]["sha256"]
    copy.write_text(copy.read_text() + "more")
    changed = script(*common, "--seq_length", "32")
    assert len(files()) == 2 * len(written)
    assert changed.results["dataset"]["sha256"] != first.results["dataset"]["sha256"]


def test_the_order_differs_between_epochs_and_not_between_runs(script):
    """Also: the default corpus is Python's own reference."""

    def losses():
        # At this learning rate the model does not move, so a loss names its block.
        run = script(
            *"--seq_length 32 --num_samples 6 --batch_size 1 --epochs 2 --lr 1e-30".split(),
            *"--no_eval --no_export --precision fp32".split(),
        )
        text = "".join(topics[name] + "\0" for name in sorted(topics))
        assert run.results["dataset"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()
        return [round(loss, 4) for loss in run.losses]

    one = losses()
    assert len(one) == 12 and sorted(one[:6]) == sorted(one[6:])  # an epoch has every block once
    assert one[:6] != one[6:]
    assert losses() == one


def test_num_samples_is_the_whole_runs_number(script):
    run = script(
        *"--seq_length 32 --num_samples 10 --batch_size 2 --no_eval --no_export".split(),
        launcher="torchrun",
        ranks=2,
    )
    assert [run.results[name] for name in ("samples", "steps", "tokens")] == [10, 3, 320]


@pytest.mark.soak
def test_memory_does_not_grow_with_the_corpus(script, tmp_path, text_file):
    """100 MB against 1 MB: tokenized once, a quick second start, and the same resident memory."""
    text = text_file.read_text()

    def start_twice(megabytes):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text((text * (megabytes * 5 + 1))[: megabytes * 1_000_000])
        work = ["--dataset", path, "--seq_length", "256", "--max_steps", "20", "--no_eval"]
        return script(*work), script(*work)

    def peak(run):
        return run.results["memory"]["host_peak_bytes"][0] / 1e6

    (_, small), (first, large) = start_twice(1), start_twice(100)
    assert large.results["seconds_to_first_step"] < 10
    assert peak(large) < peak(small) + 100
    assert peak(first) < peak(small) + 200
