"""Which files of --dataset and --validation_file are read: those of one split of a folder.

The splits of a folder have the names that the `datasets` library knows: those in the header of
README.md, `data/train-00000-of-00001.parquet`, folders `train/`, files `train.jsonl`. A folder of
`Dataset.save_to_disk` is read as well. Every other folder is one split with all of its files.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from distributed_training import console
from distributed_training.data.file_types import type_of
from distributed_training.errors import UserError
from distributed_training.files.folders import files_of
from distributed_training.files.user_files import read_user_json, shown
from distributed_training.settings.data import DataSettings

SPLITS = {
    split: re.compile(f"(?:^|[-._ 0-9])(?:{words})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, words in {
        "train": "train|training",
        "validation": "validation|valid|dev|val",
        "test": "test|testing|eval|evaluation",
    }.items()
}
SHARD = re.compile(r"(?:data/)?(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]+")
# Files that describe a dataset, and are none of its data.
ABOUT = re.compile(r"(README|LICEN[SC]E|NOTICE|CITATION|CHANGELOG)\b[^/]*", re.IGNORECASE)
METADATA = (
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
)
MOST_NAMES = 3  # files that the notice names
ALL = "--include names the files to read, --include '*' all of them"

FilesBySplit = dict[str, list[Path]]


def training_files(name: str, data: DataSettings, needs_train: bool = True) -> FilesBySplit:
    """Return the files of the splits of --dataset that are used: "train", maybe "validation".

    As for a dataset of the hub, the validation split is evaluated on, unless --validation_file or
    --validation_split names something else, or --streaming reads the training split only.

    Args:
        needs_train: False if a validation or test split alone will do (--eval_only).
    Raises:
        UserError: the folder has no training split, or several, or cannot be read.
    """
    folder = _Folder.open(name, f"--dataset {name}", data)
    names = {"train": folder.split_for("train")}
    if data.validation_file is None and data.validation_split is None and not data.streaming:
        names["validation"] = folder.split_for("validation")
        if not (needs_train or names["train"] or names["validation"]):
            names["validation"] = folder.split_for("test")
    if names["train"] is None and (needs_train or not names.get("validation")):
        raise UserError(
            f"{folder.flag} has no training split, but {shown(', '.join(folder.splits))}: {ALL}."
        )
    return folder.use({role: split for role, split in names.items() if split})


def validation_files(name: str, data: DataSettings) -> list[Path]:
    """Return the files of --validation_file: of a folder the validation, else the test split.

    Raises:
        UserError: the file or folder cannot be read.
    """
    folder = _Folder.open(name, f"--validation_file {name}", data)
    found = filter(None, map(folder.split_for, ("validation", "test")))
    split = next(found, None) or folder.split_for("train") or next(iter(folder.splits))
    return folder.use({"validation": split})["validation"]


class _Folder(NamedTuple):
    """A folder of data, or a single file."""

    flag: str  # with its name, for messages
    files: list[Path]  # all
    splits: FilesBySplit

    @classmethod
    def open(cls, name: str, flag: str, data: DataSettings) -> _Folder:
        files = files_of(Path(name), name, data.include)
        if data.include or not Path(name).is_dir():
            return cls(flag, files, {"train": files})
        return cls(flag, files, splits_of(Path(name), files, data.dataset_config))

    def split_for(self, role: str) -> str | None:
        """Return the name of the split for "train", "validation" or "test"; None without one."""
        if role in self.splits:
            return role
        named = [split for split in self.splits if SPLITS[role].search(split)]
        if role == "train" and len(named) > 1:
            raise UserError(
                f"{self.flag} has the training splits {shown(', '.join(named))}: name the files "
                f"of one, for example --include '{named[0]}*'."
            )
        return named[0] if len(named) == 1 else None

    def use(self, names: dict[str, str]) -> FilesBySplit:
        """Return the files for each role; print which split is used, and what is not."""
        does = {"train": "trained on", "validation": "evaluated on"}
        used = [
            f"{split} ({_count(self.splits[split])}) is {does[role]}"
            for role, split in names.items()
        ]
        unused = ", ".join(self._unused(set(names.values()))) if "train" in names else ""
        if unused or len(self.splits) > 1:
            rest = f" Not used: {shown(unused, 200)} ({ALL})" if unused else ""
            console.print0(f"📂 {self.flag}: {', '.join(used)}.{rest}")
        return {role: self.splits[split] for role, split in names.items()}

    def _unused(self, used: set[str]) -> Iterator[str]:
        """Yield the splits that are not used, and the files of no split."""
        for split, files in self.splits.items():
            if split not in used:
                yield f"{split} ({_count(files)})"
        of_splits = {file for files in self.splits.values() for file in files}
        names = [file.name for file in self.files if file not in of_splits]
        names = [name for name in names if name not in METADATA]
        yield from names[:MOST_NAMES]
        if len(names) > MOST_NAMES:
            yield f"{_count(names[MOST_NAMES:])} more"


def _count(files: list) -> str:
    return f"{len(files):,} file{'s' * (len(files) != 1)}"


def splits_of(folder: Path, files: list[Path], config: str | None) -> FilesBySplit:
    """Return the files of each split of a folder; only "train" for one without splits.

    Args:
        files: of the folder.
        config: --dataset_config.
    """
    if saved := _saved_to_disk(folder):
        return saved
    header = _header(folder)
    rows = [file for file in files if type_of(file) and file.name not in METADATA]
    is_from_hub = header is not None or (folder / ".gitattributes").exists()
    data = files
    if rows or is_from_hub:
        data = [f for f in files if not ABOUT.fullmatch(f.name) and f.name not in METADATA]
    if header and (found := _configured(folder, rows or data, header, config)):
        return found
    found = _by_names(folder, rows or [f for f in files if not ABOUT.fullmatch(f.name)])
    if not rows and ("train" not in found or sum(map(len, found.values())) < len(data)):
        found = {}  # texts of a user, one of which is about training
    return found or {"train": rows if rows and is_from_hub else data}


def _by_names(folder: Path, files: list[Path]) -> FilesBySplit:
    """Return the files of the splits after which they, or their folders, are named."""
    paths = {file: file.relative_to(folder).as_posix() for file in files}
    shards: FilesBySplit = {}
    for file, path in paths.items():
        if match := SHARD.fullmatch(path):
            shards.setdefault(match[1], []).append(file)
    if any(map(SPLITS["train"].search, shards)):
        return shards
    for in_names in (False, True):
        found: FilesBySplit = {}
        for file, path in paths.items():
            *folders, name = path.split("/")
            words = [name] if in_names else folders
            split = next((s for s in SPLITS if any(map(SPLITS[s].search, words))), None)
            if split:
                found.setdefault(split, []).append(file)
        if found:
            return found
    return {}


def _header(folder: Path) -> dict | None:
    """Return the header of README.md, which is YAML between two lines `---`; None without one."""
    import yaml

    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)^---[ \t]*$", text, re.DOTALL | re.MULTILINE)
    if match is None:
        return None
    try:
        header = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # nothing that is needed to train
        return {}
    return header if isinstance(header, dict) else {}


def _configured(folder: Path, files: list[Path], header: dict, config: str | None) -> FilesBySplit:
    """Return the files of each split of a configuration in README.md; {} if it names none."""
    entries = header.get("configs")
    entries = entries if isinstance(entries, list) else []
    configs = {str(e.get("config_name", "default")): e for e in entries if isinstance(e, dict)}
    if not configs:
        return {}
    name = _default_of(configs) if config is None else config
    if name not in configs:
        raise UserError(
            f"{folder} has the configurations {shown(', '.join(configs))}: choose one with "
            "--dataset_config, or files with --include."
        )
    top = folder / str(configs[name].get("data_dir") or "")
    patterns = _patterns(configs[name].get("data_files"))
    if not patterns:
        return _by_names(top, [file for file in files if top in file.parents])
    found: FilesBySplit = {}
    for split, globs in patterns.items():
        matches = (glob.glob(each, root_dir=top, recursive=True) for each in globs)
        named = {top / path for paths in matches for path in paths}
        if chosen := [file for file in files if file in named]:
            found[split] = chosen
    if not found:
        raise UserError(
            f"{folder} has no file that the data_files of its README.md name: download them, or "
            f"{ALL}."
        )
    return found


def _default_of(configs: dict[str, dict]) -> str | None:
    """Return the configuration that is read without --dataset_config; None if it is open."""
    marked = [name for name, each in configs.items() if each.get("default") is True]
    names = [*marked, *({"default"} & configs.keys())] or list(configs)
    return names[0] if marked or len(names) == 1 else None


def _patterns(data_files: object) -> dict[str, list[str]]:
    """Return {split: patterns of its files} for the data_files of a configuration."""
    if isinstance(data_files, dict):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    entries = data_files if isinstance(data_files, list) else [data_files]
    found: dict[str, list[str]] = {}
    for entry in filter(None, entries):
        split, path = "train", entry
        if isinstance(entry, dict):
            split, path = str(entry.get("split", "train")), entry.get("path")
        paths = path if isinstance(path, list) else [path]
        if path is not None:
            found.setdefault(split, []).extend(map(str, paths))
    return found


def _saved_to_disk(folder: Path) -> FilesBySplit:
    """Return the files of the splits that `save_to_disk` has written; {} for other folders."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_user_json("--dataset", str(folder / "dataset_dict.json")).get("splits")
        names = list(map(str, splits)) if isinstance(splits, list) else []
        return {name: _saved_table(folder / name) for name in names}
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return {"train": _saved_table(folder)}
    return {}


def _saved_table(folder: Path) -> list[Path]:
    state = read_user_json("--dataset", str(folder / "state.json"))
    entries = state.get("_data_files")
    entries = entries if isinstance(entries, list) else []
    files = [folder / str(each.get("filename")) for each in entries if isinstance(each, dict)]
    if not files or state.get("_indices_data_files") or not all(map(Path.is_file, files)):
        raise UserError(
            f"{folder} is not a complete table of save_to_disk: write it as Parquet where it can "
            f"be loaded: datasets.load_from_disk({str(folder)!r}).to_parquet('train.parquet')."
        )
    return files
