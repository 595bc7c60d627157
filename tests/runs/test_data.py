"""From files to blocks: every format, one cache, one order."""

import hashlib
from pydoc_data.topics import topics

import pandas
import pytest
from streams import ids_of, tokenized
from tokenizer_zoo import tokenizer_of

TEXTS = ["the quick brown fox " * 40, "jumps over \n\nthe lazy dog " * 50, "anémone 猫 " * 30]


def write(folder, kind):
    """The same three documents in each format."""
    path, table = folder / f"corpus.{kind}", pandas.DataFrame({"id": [0, 1, 2], "body": TEXTS})
    if kind in ("json", "jsonl"):
        table.to_json(path, orient="records", lines=kind == "jsonl")
    elif kind == "csv":
        table.to_csv(path, index=False)
    elif kind == "parquet":
        table.to_parquet(path)
    else:
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number}.md").write_bytes(text.encode())
    return path


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder"])
def test_every_format_gives_the_same_stream(tmp_path, kind):
    """The documents, with an end-of-text token between them."""
    tokenizer, path = tokenizer_of("gpt2"), write(tmp_path, kind)
    prepared = tokenized(path, tokenizer, tmp_path / "cache", "--text_column", "body")
    tokens, end = ids_of(prepared).tolist(), tokenizer.eos_token_id
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert tokens == [*encoded[0], end, *encoded[1], end, *encoded[2]]


def test_tokenised_once_for_every_length_and_again_when_the_text_changes(
    script, llama, tmp_path, text_file
):
    cache, copy = tmp_path / "cache", tmp_path / "copy.txt"
    copy.write_bytes(text_file.read_bytes())

    def digest_and_cache(seq_length):
        work = f"--max_steps 1 --no_eval --no_export --seq_length {seq_length}".split()
        run = script("--model", llama, "--dataset", copy, "--cache_dir", cache, *work)
        files = {path: path.stat().st_mtime_ns for path in cache.glob("*/*")}
        return run.results["dataset"]["sha256"], files

    first = digest_and_cache(32)
    assert digest_and_cache(64) == first
    copy.write_text(copy.read_text() + "more")
    digest, files = digest_and_cache(32)
    assert digest != first[0] and len(files) == 2 * len(first[1])


def test_the_order_differs_between_epochs_and_not_between_runs(script):
    """Also: the default corpus is Python's own reference."""

    # At this learning rate the model does not move, so a loss names its block.
    work = "--seq_length 32 --num_samples 6 --batch_size 1 --epochs 2 --lr 1e-30".split()
    runs = [script(*work, *"--no_eval --no_export --precision fp32".split()) for _ in range(2)]
    one, other = ([round(loss, 4) for loss in run.losses] for run in runs)
    assert len(one) == 12 and sorted(one[:6]) == sorted(one[6:])  # an epoch has every block once
    assert one[:6] != one[6:] and other == one
    text = "".join(topics[name] + "\0" for name in sorted(topics))
    assert runs[0].results["dataset"]["sha256"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.soak
def test_memory_does_not_grow_with_the_corpus(script, tmp_path, text_file):
    """100 MB against 1 MB: tokenized once, a quick second start, and the same resident memory."""
    text = text_file.read_text()

    def run_twice(megabytes):
        path = tmp_path / f"{megabytes}.txt"
        path.write_text((text * (megabytes * 5 + 1))[: megabytes * 1_000_000])
        work = ["--dataset", path, "--seq_length", "256", "--max_steps", "20", "--no_eval"]
        runs = [script(*work).results for _ in range(2)]
        return runs[1], [run["memory"]["host_peak_bytes"][0] / 1e6 for run in runs]

    (_, (_, small)), (again, (first, large)) = run_twice(1), run_twice(100)
    assert again["seconds_to_first_step"] < 10
    assert large < small + 100 and first < small + 200
