"""The remedies that messages print: each is run on the input that it is for, which is accepted then."""

import gzip
import json
import re
import shutil
import subprocess

import pytest

from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import BadRow, RowOptions
from distributed_training.errors import UserError

TEXTS = {
    name: line * 5
    for name, line in {
        "typographic": "“quick”, café: naïve — it’s €5 … créée\n",
        "Latin": "café, naïve, straße, ¿qué?\n",
        "Russian": "Привет, мир! Это текст.\n",
        "Chinese": "这是一个测试，模型。一 GPU\n",
        "traditional": "這是測試，模型。\n",
        "Japanese": "日本語のテスト。カタカナ\n",
        "words": "学習 カ\n",
        "Korean": "안녕 세계\n",
        "Polish": "Zażółć gęślą jaźń, był\n",
    }.items()
}


def texts_of(file):
    """The texts of a file's rows; a UserError if one cannot be read."""
    rows = list(rows_of_file(file, RowOptions()))
    for row in rows:
        if isinstance(row, BadRow):
            raise row
    return ["".join(row.pieces) for row in rows]


def refusal_of(file) -> str:
    with pytest.raises(UserError) as caught:
        texts_of(file)
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


def after_the_remedy(message, folder):
    """Run the command in a message, which writes the file NEW.*, and return the texts in it."""
    [command] = re.findall(r"`(.*?)`", message)
    subprocess.run(command, shell=True, cwd=folder)
    [new] = folder.glob("NEW*")
    return texts_of(new)


def write(folder, suffix, name, encoding, mark=""):
    """Write a file of text, or of rows with a line of the text each."""
    text = TEXTS[name]
    rows = [{"text": line} for line in text.splitlines()]
    content = {
        ".txt": text,
        ".txt.gz": text,
        ".jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        ".json": json.dumps(rows, ensure_ascii=False),
        ".csv": "text,n\n" + "".join(f'"{row["text"]}",1\n' for row in rows),
    }[suffix]
    file, data = folder / f"my file{suffix}", (mark + content).encode(encoding)
    file.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    return file


def same(texts, name) -> bool:
    return "".join("".join(texts).split()) == "".join(TEXTS[name].split())


SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".json", ".csv")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_names_the_encoding(tmp_path, suffix, encoding):
    file = write(tmp_path, suffix, "Chinese", encoding, mark="\ufeff")
    assert same(texts_of(file), "Chinese")


KNOWN = [
    *(("cp1252", name) for name in ("typographic", "Latin")),
    *((f"utf-16-{end}", name) for end in ("le", "be") for name in ("Latin", "Russian", "Chinese")),
    *((f"utf-32-{end}", name) for end in ("le", "be") for name in ("typographic", "Japanese")),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("encoding, name", KNOWN)
def test_the_command_converts_the_file(tmp_path, suffix, encoding, name):
    """No character is another one afterwards: typographic quotes of CP1252, for example."""
    message = refusal_of(write(tmp_path, suffix, name, encoding))
    assert same(after_the_remedy(message, tmp_path), name)


UNKNOWN = [
    *((encoding, "Russian") for encoding in ("koi8-r", "cp1251", "iso8859-5", "cp866")),
    *((encoding, name) for encoding in ("cp932", "euc-jp") for name in ("Japanese", "words")),
    *(("gb18030", "Chinese"), ("big5", "traditional"), ("euc-kr", "Korean")),
    *((encoding, "Polish") for encoding in ("cp1250", "iso8859-2")),
    *((encoding, "Latin") for encoding in ("macintosh", "cp437", "cp850")),
]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("encoding, name", UNKNOWN)
def test_no_encoding_is_guessed_that_would_change_the_text(tmp_path, encoding, name, suffix):
    message = refusal_of(write(tmp_path, suffix, name, encoding))
    assert "iconv -f ENCODING -t UTF-8" in message
    assert same(after_the_remedy(message.replace("ENCODING", encoding), tmp_path), name)


def test_bytes_in_a_file_of_utf_8_do_not_convert_the_rest(tmp_path):
    """A conversion of the whole file would change the characters that are right."""
    file, text = tmp_path / "a.txt", "naïve 日本\n" * 20
    file.write_bytes(text.encode() + b"caf\xe9\n")
    message = refusal_of(file)
    assert "line 21" in message
    assert after_the_remedy(message, tmp_path) == [text + "caf\n"]


@pytest.mark.parametrize(
    "content, said",
    [
        (TEXTS["typographic"].encode("utf-16")[:-1], "damaged.*UTF-16"),
        (b"PK\x03\x04" + bytes(range(256)), "no text: unpack"),
        (b"\xed\xa0\xbd\xed\xb8\x80 a\n", "ENCODING"),  # a surrogate pair, encoded one by one
    ],
)
def test_files_that_no_command_converts(tmp_path, content, said):
    (tmp_path / "a.txt").write_bytes(content)
    assert re.search(said, refusal_of(tmp_path / "a.txt"))


@pytest.mark.parametrize("text", ["zero\0byte and more words", "\0" * 50, "日本\0語 の"])
def test_a_zero_byte_alone_is_no_other_encoding(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert texts_of(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("half", ["\\ud83d", "\\udc80"])
def test_half_of_a_surrogate_pair_is_no_matter_of_encodings(tmp_path, half):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "naïve {half}"}}\n')
    message = refusal_of(tmp_path / "a.jsonl")
    assert half in message and "line 1" in message and "iconv" not in message


def test_a_parquet_file_is_not_converted_like_text(tmp_path):
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.array([b"caf\xe9"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert "iconv" not in refusal_of(tmp_path / "a.parquet")


# ------------------------------------------------------------------------------------ other layouts


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.csv", "text;label\nhello, you;1\n"),
        ("b.csv", '"text"|"n"\n"hello, you"|b\n'),
        ("c.tsv", 'text,label\n"hello, you",b\n'),
        ("d.csv", "text\tanswer\nhello, you\tb\n"),
    ],
)
def test_another_delimiter(tmp_path, monkeypatch, name, content):
    import pandas

    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    [call] = re.findall(r"read_csv\(.*\)", refusal_of(tmp_path / name))
    new = f"NEW{(tmp_path / name).suffix}"
    eval(f"pandas.{call}", {"pandas": pandas, "FILE": name, "NEW": new})
    assert texts_of(tmp_path / new) == ["hello, you"]


@pytest.mark.skipif(not shutil.which("jq"), reason="jq is missing")
@pytest.mark.parametrize("keys", [["data"], ["my data", "train"], ["it's"], ["a", "b-c"]])
@pytest.mark.parametrize("rows", [[{"text": "hello"}], ["hello"]])
def test_rows_inside_an_object(tmp_path, keys, rows):
    value = rows
    for key in reversed(keys):
        value = {"version": 1, key: value}
    (tmp_path / "a.json").write_text(json.dumps(value))
    [command] = re.findall(r"\((jq .*)\)", refusal_of(tmp_path / "a.json"))
    subprocess.run(command.replace("FILE", "a.json"), shell=True, cwd=tmp_path)
    assert texts_of(tmp_path / "NEW.jsonl") == ["hello"]
