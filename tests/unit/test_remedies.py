"""The remedies that messages print: each is run on the input that it is for, which is accepted then."""

import gzip
import json
import re
import resource
import shutil
import subprocess
from importlib.util import find_spec

import pytest
import transformers
from tokenizer_zoo import tokenizer_of

from distributed_training.cli.check_run import check_model_path
from distributed_training.cli.checks import check_data_paths, names_on_hub
from distributed_training.cli.parse import parse_arguments
from distributed_training.data.row_files import rows_of_file
from distributed_training.data.rows import BadRow, RowOptions
from distributed_training.errors import UserError, explain
from distributed_training.files.user_files import reason_of
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.model.config import read_config
from distributed_training.model.tokenizer import read_tokenizer

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


# ------------------------------------------------------------------------- permissions and limits


def test_the_command_that_allows_to_read_a_folder(tmp_path):
    """A name with a space is quoted, and a long one is not shortened."""
    (folder := tmp_path / f"my {'long ' * 30}folder").mkdir(mode=0o700)
    (file := folder / "a.txt").touch(mode=0o600)
    [command] = re.findall(r"`(.*)`", reason_of(PermissionError(), folder))
    subprocess.run(command, shell=True, check=True)
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o755, 0o644)


@pytest.mark.parametrize("hard, most", [(4096, 4096), (1 << 20, 65536), (-1, 65536)])
def test_the_advised_number_of_open_files_is_allowed(monkeypatch, hard, most):
    """Only root can raise the hard limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    assert f"`ulimit -n {most}`" in str(explain(OSError(24, "Too many open files")))


# -------------------------------------------------------------------------- folders of models, data


def checked(name):
    check_model_path(parse_arguments(["--model", name]).model)


def test_a_folder_that_hides_a_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "org/name"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "notes.txt").write_text("not a model")
        with pytest.raises(UserError, match=rf"if you mean {name} of the hub, rename"):
            checked(name)
        (tmp_path / name).rename(tmp_path / f"my_{name.partition('/')[0]}")
        assert names_on_hub(name, [])[0] == name
    with pytest.raises(UserError) as caught:
        checked("./my_gpt2")
    assert "of the hub" not in str(caught.value)


def test_a_folder_does_not_hide_the_embedded_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / EMBEDDED_MODEL).mkdir()
    checked(EMBEDDED_MODEL)


def test_a_folder_that_hides_a_data_set_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "imdb").mkdir()
    with pytest.raises(UserError, match=r"no files.*if you mean imdb of the hub, rename"):
        check_data_paths(parse_arguments(["--dataset", "imdb"]).data)
    (tmp_path / "imdb").rename(tmp_path / "old")
    check_data_paths(parse_arguments(["--dataset", "imdb"]).data)


def test_the_folder_of_a_run_names_its_export(tmp_path):
    exported = tmp_path / "my run" / "hf"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UserError) as caught:
        checked(str(exported.parent))
    [path] = re.findall(r"name ('.*'),", str(caught.value))
    checked(path.strip("'"))


# --------------------------------------------------------------------------- tokenizers and configs

OWN_CODE = {
    "tokenizer_class": "OtherTokenizer",
    "auto_map": {"AutoTokenizer": ["other.Other", None]},
}
VERSION_5 = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<mask>"]}


def folder_of_tokenizer(folder, settings):
    """A tokenizer's folder with these values in tokenizer_config.json instead of its own."""
    tokenizer_of("gpt2").save_pretrained(folder)
    values = {"eos_token": "<|end|>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize("settings", [OWN_CODE, VERSION_5])
def test_a_tokenizer_that_only_other_code_reads(tmp_path, settings):
    """Of the model, or of a newer transformers, which reads it in this case."""
    folder = folder_of_tokenizer(tmp_path, settings)
    if settings == VERSION_5 and transformers.__version__ >= "5":
        assert read_tokenizer(folder, "--model X")("fox").input_ids
        return
    with pytest.raises(UserError) as caught:
        read_tokenizer(folder, "--model X")
    message = str(caught.value)
    assert "copy" not in message and "trust_remote_code" not in message
    assert "tokenizer_class to PreTrainedTokenizerFast" in message
    values = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if settings == VERSION_5:
        assert "rename extra_special_tokens to additional_special_tokens" in message
        values["additional_special_tokens"] = settings["extra_special_tokens"]
    expected = tokenizer_of("gpt2")("the fox <mask>").input_ids
    found = read_tokenizer(folder_of_tokenizer(tmp_path, values), "--model X")
    assert found("the fox <mask>").input_ids == expected


def test_a_tokenizer_without_a_tokenizer_json(tmp_path):
    """The message names the package for the kind of the file, and no other one."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    for content, package in ((b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\n", "tiktoken")):
        (tmp_path / "tokenizer.model").write_bytes(content)
        if find_spec(package) is None:
            with pytest.raises(UserError, match=f"pip install {package}\\.$"):
                read_tokenizer(str(tmp_path), "--model X")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(OWN_CODE))
    (tmp_path / "tokenizer.model").rename(tmp_path / "vocab.tiktoken")
    with pytest.raises(UserError, match=r"own.*without such code"):
        read_tokenizer(str(tmp_path), "--model X")


def test_a_tokenizer_of_a_newer_release_of_tokenizers(tmp_path):
    folder = folder_of_tokenizer(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast"})
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["type"] = "NewModel"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="pip install --upgrade tokenizers transformers"):
        read_tokenizer(folder, "--model X")


@pytest.mark.parametrize(
    "values, said",
    [
        ({"model_type": "newer"}, "newer.*pip install --upgrade transformers"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "other.Other"}}, "code of its own"),
        ({}, "no model_type"),
    ],
)
def test_a_configuration_that_transformers_cannot_read(tmp_path, values, said):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=said) as caught:
        read_config(str(tmp_path), "--model X")
    assert "trust_remote_code" not in str(caught.value)
