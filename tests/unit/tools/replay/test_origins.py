"""The rows of the dataset that a sequence of a replayed step comes from."""

import json

import numpy as np
import pytest
from streams import tokenized
from tokenizer_zoo import KINDS, tokenizer_of
from tokenizers import decoders

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.corpus import split_sequences
from distributed_training.data.rows import RowOptions
from distributed_training.data.sequences import Padding
from distributed_training.data.sources import open_source
from tools.replay.origins import origins_in_stream, origins_of

LENGTH = 32


def bytes_tokenizer():
    """GPT-2's kind of tokenizer, whose tokens decode to the text."""
    tokenizer = tokenizer_of("gpt2")
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def opened(file, tokenizer, folder, *flags):
    """The settings, the sequences of a corpus without a validation split, and its facts."""
    flags = ["--dataset", str(file), "--seq_length", str(LENGTH), "--validation_split", "0", *flags]
    settings = parse_arguments(flags)
    prepared = tokenized(file, tokenizer, folder, bad=1)
    parts = settings.data, settings.training
    sequences = split_sequences(prepared, *parts, Padding(LENGTH, 8))[0]
    return settings.data, sequences, {"bad_rows": prepared["bad_rows"]}


def rows_of(file, tokenizer, folder, *flags):
    """The text of each sequence, and the places of its rows."""
    data, sequences, facts = opened(file, tokenizer, folder, *flags)
    numbers = [*range(sequences.num_sequences)]
    origins = origins_of(numbers, sequences, data, facts, tokenizer)
    texts = []
    for number in numbers:
        ids = np.concatenate([part for part, _ in sequences.parts(number)]).astype(np.int64)
        texts.append(tokenizer.decode(np.where(ids < 0, ~ids, ids)))
    return texts, [[origin.row for origin in own] for own in origins]


def write_rows(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_the_rows_of_documents(kind, tmp_path):
    """With every kind of tokenizer; an empty row has no tokens."""
    texts = [
        f"Row {n} {chr(97 + n) * 3} has the number {n} and {n * 7} words. " * 2 for n in range(9)
    ]
    rows = [{"text": text} for text in texts]
    rows.insert(4, {"text": ""})
    file, tokenizer = write_rows(tmp_path, rows), tokenizer_of(kind)
    found, origins = rows_of(file, tokenizer, tmp_path)
    seen = [line for own in origins for line in own]
    lines = [f"{file}, line {n}" for n in range(1, 11) if n != 5]
    assert list(dict.fromkeys(seen)) == lines[: len(set(seen))]  # in their order, none left out
    assert len(found) > 3 and len(set(seen)) > 6


def test_a_text_that_contains_the_separator(tmp_path):
    """Counting it would name a later row; the words of the sequence name the right one."""
    tokenizer = bytes_tokenizer()
    end = tokenizer.eos_token  # special, so that the text may contain it
    texts = [f"First {end} second {end} third: " + "alpha beta gamma delta " * 12]
    texts += [" ".join(f"{word}{n}" for n in range(40)) for word in ("one", "two")]
    file = write_rows(tmp_path, [{"text": text} for text in texts])
    found, origins = rows_of(file, tokenizer, tmp_path)
    for text, own in zip(found, origins, strict=True):
        if "two2" in text and end not in text:
            assert own == [f"{file}, line 3"]
            break
    else:
        pytest.fail("no sequence lies within the last row")


def test_the_rows_of_examples_without_those_that_cannot_be_used(tmp_path):
    rows = [{"prompt": f"question {n} ", "completion": f"answer number {n}"} for n in range(8)]
    rows[2] = {"prompt": "", "completion": ""}
    file = write_rows(tmp_path, rows)
    flags = ["--max_bad_rows", "1"]
    for packing in ([], ["--packing"]):
        found, origins = rows_of(file, bytes_tokenizer(), tmp_path, *flags, *packing)
        seen = 0
        for text, own in zip(found, origins, strict=True):
            for place in own:
                number = int(place.removeprefix(f"{file}, line ")) - 1
                assert f"answer number {number}" in text
                seen += 1
        assert seen == 7


def test_the_line_of_a_text_file(tmp_path):
    file, tokenizer = tmp_path / "book.txt", bytes_tokenizer()
    file.write_text("\n".join(f"The line {n} of the book about {n * n}." for n in range(1, 80)))
    found, origins = rows_of(file, tokenizer, tmp_path)
    for text, [place] in zip(found, origins, strict=True):
        line = int(place.removeprefix(f"{file}, line "))
        sequence = f"line {line} of", f"{line * line}.", f"line {line + 1} of"
        assert any(words in text for words in sequence)


def test_a_sequence_of_a_stream_is_searched_for(tmp_path):
    texts = [" ".join(f"{word}{n}" for n in range(60)) for word in ("one", "two", "six")]
    file, tokenizer = write_rows(tmp_path, [{"text": text} for text in texts]), bytes_tokenizer()
    for last in ({"text": texts[2]}, {"prompt": "Which one?", "completion": texts[2]}):
        rows = [{"text": text} for text in texts[:2]] if "text" in last else []
        file = write_rows(tmp_path, [*rows, last])
        options = RowOptions.of(parse_arguments([]).data, tokenizer)
        source = open_source(str(file), parse_arguments([]).data, options, eval_only=False)
        shown = [f"{texts[1][100:250]}{tokenizer.eos_token}{texts[2][40:160]}", "nowhere to be"]
        found = origins_in_stream(shown, source.splits["train"](None), "mine", tokenizer.eos_token)
        places = [f"{file}, line 2" if rows else None, f"{file}, line {len(rows) + 1}"]
        assert [[one.row for one in own] for own in found] == [places, [None]]


def test_a_few_words_of_a_document_of_a_stream(tmp_path):
    """Other rows have them, too: the row that begins or ends with them is named, or none."""
    long = [" ".join(f"{word}{n}" for n in range(40)) for word in ("one", "two", "six", "ten")]
    notice = "This answer is only for general information, and it may contain errors."
    rows = [
        f"We know that the end {long[0]}",
        f"The end {long[1]} at the end",
        f"The end {long[2]}",
    ]
    rows += [f"{long[3]}\nthe end", f"{notice}\nAsk one.\nBye.", f"{notice}\nAsk two.\nBye."]
    file = write_rows(tmp_path, [{"text": text} for text in rows])
    tokenizer = bytes_tokenizer()
    options = RowOptions.of(parse_arguments([]).data, tokenizer)
    source = open_source(str(file), parse_arguments([]).data, options, eval_only=False)
    end = tokenizer.eos_token
    shown = [
        f"{rows[1][60:]}{end}The end",  # of two rows
        f"{rows[0][60:]}{end}We know",
        f"at the end{end}{rows[2]}{end}",
        f"the end{end}{rows[3][:90]}",  # of two rows
        f"{end}{rows[5]}{end}Bye",  # no row begins so
    ]
    found = origins_in_stream(shown, source.splits["train"](None), "mine", end)
    lines = [[one.row and int(one.row.split()[-1]) for one in own] for own in found]
    assert lines == [[2, None], [1, 1], [2, 3], [None, 4], [6, None]]
