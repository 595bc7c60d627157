"""Which files of a folder are trained on, and which are evaluated on."""

import json

import pytest
from streams import ids_of, stream_of, tokenized
from tokenizer_zoo import tokenizer_of

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.folder_splits import training_files, validation_files
from distributed_training.errors import UserError

HEADER = """---
license: mit
configs:
- config_name: small
  data_files: a/*.jsonl
- config_name: large
  default: true
  data_files:
  - split: train
    path: [a/*.jsonl, "b/**"]
  - split: dev
    path: c.jsonl
---
# A dataset
"""
TWO = HEADER.replace("  default: true\n", "")
OTHER_FOLDER = "---\nconfigs:\n- config_name: default\n  data_dir: v2\n---\n"

# The files, the header of README.md, the flags, and what is trained and evaluated on.
FOLDERS = {
    "shards": (
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet "
        "data/validation-00000-of-00001.parquet data/test-00000-of-00001.parquet LICENSE",
        "# A dataset",
        "",
        "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet",
        "data/validation-00000-of-00001.parquet",
    ),
    "shards with other names": (
        "data/train_sft-00000-of-00001.parquet data/test_sft-00000-of-00001.parquet",
        None,
        "",
        "data/train_sft-00000-of-00001.parquet",
        "",
    ),
    "files": ("train.jsonl val.jsonl eval.jsonl more.jsonl", None, "", "train.jsonl", "val.jsonl"),
    "words in names": ("my-Train_1.csv my.dev.csv", None, "", "my-Train_1.csv", "my.dev.csv"),
    "folders": ("training/a.json test/train.json x.json", None, "", "training/a.json", ""),
    "texts": ("wiki.train.raw wiki.valid.raw", None, "", "wiki.train.raw", "wiki.valid.raw"),
    "own validation": ("train.csv dev.csv", None, "--validation_split 0.1", "train.csv", ""),
    "a stream": ("train.csv dev.csv", None, "--dataset x.csv --streaming --max_steps 1", "train.csv", ""),
    "included": ("train.csv test.csv", None, "--include *", "test.csv train.csv", ""),
    "a header": ("a/1.jsonl b/d/2.jsonl c.jsonl test.jsonl", HEADER, "", "a/1.jsonl b/d/2.jsonl", "c.jsonl"),
    "one of its configurations": ("a/1.jsonl b/2.jsonl", HEADER, "--dataset_config small", "a/1.jsonl", ""),
    "a folder in the header": ("v1/train.csv v2/train.csv", OTHER_FOLDER, "", "v2/train.csv", ""),
    "a header that is no YAML": ("train.csv test.csv", "---\na: [\n---\n", "", "train.csv", ""),
    "one file of a dataset": ("d.jsonl LICENSE vocab.py", "---\na: 1\n---\n", "", "d.jsonl", ""),
    "rows without splits": ("a.csv b.txt", "# Rows", "", "a.csv b.txt", ""),
    "texts about training": ("train_ride.txt other.txt", "# T", "", "README.md other.txt train_ride.txt", ""),
    "texts about tests": ("test_1.txt test_2.txt", None, "", "test_1.txt test_2.txt", ""),
    "code": ("train.py model.py tests/test_model.py", None, "", "model.py tests/test_model.py train.py", ""),
}  # fmt: skip


def make(folder, names, readme):
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("text")
    if readme:
        (folder / "README.md").write_text(readme)
    return str(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_splits_of_a_folder(folder, tmp_path):
    names, readme, flags, *wanted = FOLDERS[folder]
    name, data = make(tmp_path, names, readme), parse_arguments(flags.split()).data
    found = training_files(name, data)
    paths = {k: " ".join(str(f.relative_to(tmp_path)) for f in v) for k, v in found.items()}
    assert [paths["train"], paths.get("validation", "")] == wanted


@pytest.mark.parametrize("name", ["validation.jsonl", "test-00000-of-00001.parquet"])
def test_an_evaluation_needs_no_training_split(tmp_path, name):
    folder, data = make(tmp_path, name, None), parse_arguments([]).data
    found = training_files(folder, data, needs_train=False)
    assert [file.name for file in found["validation"]] == [name] and "train" not in found
    with pytest.raises(UserError, match="no training split"):
        training_files(folder, data)


def test_the_notice_names_what_is_not_used(tmp_path, capsys):
    name = make(tmp_path, "train.csv dev.csv test.csv a.md b.md c.md", "# Rows")
    training_files(name, parse_arguments([]).data)
    said = capsys.readouterr().out
    assert "train (1 file) is trained on, validation (1 file) is evaluated on" in said
    assert "Not used: test (1 file), README.md, a.md, b.md, 1 file more (--include" in said
    training_files(make(tmp_path / "texts", "a.txt b.txt", "# Texts"), parse_arguments([]).data)
    assert not capsys.readouterr().out


REFUSED = [
    ("test.jsonl dev.jsonl", None, "has no training split, but validation, test"),
    ("data/train_a-00000-of-00001.csv data/train_b-00000-of-00001.csv", None, "train_a, train_b"),
    ("a/1.jsonl", TWO, "small, large: choose one with --dataset_config"),
    ("x.jsonl", HEADER, "no file that the data_files"),
]


@pytest.mark.parametrize("names, readme, said", REFUSED)
def test_folders_in_which_the_training_split_is_not_clear(names, readme, said, tmp_path):
    with pytest.raises(UserError, match=said):
        training_files(make(tmp_path, names, readme), parse_arguments([]).data)


def test_the_validation_file_may_be_the_same_folder(tmp_path):
    """Its validation split, else its test split, else all; also with --streaming."""
    data = parse_arguments([]).data
    for names, used in (("train.csv dev.csv test.csv", "dev"), ("train.csv test.csv", "test")):
        name = make(tmp_path / used, names, None)
        assert [file.stem for file in validation_files(name, data)] == [used]
    for split, text in (("train", "a list"), ("dev", "a tuple")):
        (tmp_path / "rows" / split).mkdir(parents=True)
        row = json.dumps({"text": f"{text} " * 40})
        (tmp_path / "rows" / split / "1.jsonl").write_text(row)
    name, tokenizer = str(tmp_path / "rows"), tokenizer_of("gpt2")
    cache = {"validation_file": name, "cache_dir": str(tmp_path / "cache")}
    stream = stream_of(name, tokenizer, **cache)
    stream.summary()
    [tokens] = (tmp_path / "cache").glob("*/validation.bin")
    prepared = tokenized(name, tokenizer, tmp_path, "--validation_file", name)
    assert prepared["splits"]["validation"]["tokens"] == tokens.stat().st_size // 2
    assert "tuple" not in tokenizer.decode(ids_of(prepared))


def test_tables_of_save_to_disk(tmp_path, capsys):
    """A table, several as a DatasetDict, and a shard that an earlier save has left."""
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict({"text": ["one", "two", "three"], "id": [1, 2, 3]})
    table.save_to_disk(tmp_path / "one", num_shards=2)
    table.save_to_disk(tmp_path / "one")
    both = datasets.DatasetDict(train=table, test=table.select([0]))
    both.save_to_disk(tmp_path / "both")
    for name in ("one", "both"):
        prepared = tokenized(tmp_path / name, tokenizer_of("gpt2"), tmp_path / "cache")
        assert prepared["splits"]["train"]["rows"] == 3
    assert capsys.readouterr().out.count("Not used: test (1 file)") == 1
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UserError, match=r"load_from_disk\('.*/one'\).to_parquet"):
        training_files(str(tmp_path / "one"), parse_arguments([]).data)
