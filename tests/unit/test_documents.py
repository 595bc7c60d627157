"""The documents follow their conventions, and what they name exists. See helpers/documents.py."""

import functools
import importlib
import re

import documents
import pytest
import schema_check
from documents import MARKERS, PROJECT, flags_of, is_missing, parser_of, read, tracked
from generate_docs import SECTIONS, generated

from support.tables import STRATEGIES

NAMES = sorted(n for n in tracked() if re.fullmatch(r"(docs/)?\w+\.md", n) and n != "CHANGELOG.md")
PAGES = [read(name) for name in NAMES]
MOST_PAGES, MOST_LINES = 9, 2000  # in docs/, and with README.md; FLAGS.md is generated
LONGEST_README = 149
# Flags, files and variables of other programs, and what commands write under their own names.
THEIR_FLAGS = {
    *("--kill-on-bad-exit", "--cpus-per-task", "--gpus-per-node", "--gpus-per-task", "--nodes"),
    *("--ntasks", "--ntasks-per-node", "--gres", "--signal", "--time", "--eos_token"),
}
THEIR_FILES = {
    "run_clm.py",
    "run_clm_no_trainer.py",
    "scripts/run_training.sh",
    "scripts/slurm_job.sh",
}
THEIR_NAMES = {"use_multi_rank_bucket_allreduce", "dp_fp16"}
THEIR_VARIABLES = (
    *("CUDA_", "GLOO_", "HF_", "NCCL_", "OMP_", "PET_", "PIP_", "PYTORCH_", "SLURM_", "TORCH_"),
    "WANDB_",
)

every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def problems(page, found) -> None:
    """Fail with one line for each (line number, problem)."""
    lines = [f"{page.name}:{number}: {problem}" for number, problem in found]
    assert not lines, "\n" + "\n".join(lines)


@every_page
def test_every_block_has_a_marker(page):
    problems(page, wrong_markers(page))


def wrong_markers(page):
    before = ""
    for block in page.blocks:
        marker = block.marker
        if marker not in MARKERS and not marker.startswith("file: "):
            yield (
                block.line,
                f"no marker before the fence (one of {', '.join(MARKERS)}, file: NAME)",
            )
        if marker == "output" and before not in ("runnable", "output"):
            yield block.line, "output without a runnable block before it: use illustration"
        if marker in documents.COMMANDS and block.language != "bash":
            yield block.line, f"a block that is {marker} must be ```bash"
        before = before if marker.startswith("file: ") else marker


def test_there_are_few_and_short_pages():
    lines = {p.name: len(p.lines) for p in PAGES if p.name.startswith("docs/")}
    del lines["docs/FLAGS.md"]
    readme = len(read("README.md").lines)
    assert len(lines) <= MOST_PAGES and readme <= LONGEST_README
    assert sum(lines.values()) + readme <= MOST_LINES, lines


@every_page
def test_columns(page):
    problems(page, long_lines(page))


def long_lines(page):
    for number, line in page.prose.items():
        length = len(re.sub(r"\]\([^)]*\)|<?https?://\S+|^\[[^\]]+\]: .*", "", line))
        if length > 100 and not line.lstrip().startswith("|"):
            yield number, f"{length} columns"


@every_page
def test_tables(page):
    problems(page, broken_tables(page))


def broken_tables(page):
    """A table begins with a header and a delimiter row; an empty line ends it."""
    row = re.compile(r"\s*\|")
    for number, line in page.prose.items():
        begins = row.match(line) and not row.match(page.prose.get(number - 1, ""))
        if begins and not re.match(r"\s*\|( *:?-+:? *\|)+$", page.prose.get(number + 1, "")):
            yield number, "a row outside a table"


@every_page
def test_generated_parts_are_current(page):
    text = (PROJECT / page.name).read_text("utf-8")
    assert generated(text) == text, "stale: run python scripts/generate_docs.py"


def test_every_generated_part_is_in_a_page():
    lines = [line for page in PAGES for line in page.lines]
    assert all(lines.count(f"<!-- generated: {name} -->") == 1 for name in SECTIONS)


@every_page
def test_begins_with_a_title_and_a_sentence(page):
    lines = [line for line in page.prose.values() if line.strip()]
    assert lines[0].startswith("# ") and re.match(r"[A-Z`*\[]", lines[1]), lines[:2]


@every_page
def test_links(page):
    problems(page, broken_links(page))


def broken_links(page):
    for number, target in page.links():
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((PROJECT / page.name).parent / path).resolve()
        if path and not file.exists():
            yield number, f"{target}: no such file"
        elif anchor and (not path or file.suffix == ".md"):
            of = read(str(file.relative_to(PROJECT))) if path else page
            if anchor not in of.anchors():
                yield number, f"{target}: no such anchor"


@every_page
def test_flags(page):
    problems(page, unknown_flags(page))


@functools.cache
def every_flag() -> set:
    programs = [n for n in tracked() if re.fullmatch(r"scripts/\w+\.py", n)]
    programs = {*programs, "benchmarks/peers.py", "benchmarks/gpu_check.py"}
    programs -= {"scripts/trainer_step.py"}
    found = set().union(*(flags_of(parser_of(program)) for program in programs))
    launchers = {f"--{name}" for name in documents.LAUNCHER_FLAGS}
    return found | launchers | flags_of(parser_of("real_model_example.py")) | THEIR_FLAGS


def unknown_flags(page):
    written = documents.created(page)
    for number, words in page.commands():
        unknown = documents.unknown_flags(words)
        for flag in unknown:
            yield number, f"{flag} is no flag of {documents.program_of(words)[0] or words[0]}"
        if not unknown and not written & {*words} and (error := documents.usage_error(words)):
            yield number, error
    known = every_flag()
    for number, text in page.spans():
        words = text.split()
        if documents.program_of(words)[0]:
            unknown = documents.unknown_flags(words)
        elif words[0].startswith("-"):
            names = [word.split("=")[0].rstrip(",;") for word in words if re.match(r"--\w", word)]
            unknown = [name for name in names if name not in known]
        else:
            unknown = []  # of another program
        for flag in unknown:
            yield number, f"{flag} is no flag: `{text}`"


@every_page
def test_files(page):
    problems(page, missing_files(page))


def missing_files(page):
    written = documents.created(page) | THEIR_FILES
    named = [(number, word) for number, text in page.spans() for word in text.split()]
    named += [(number, word) for number, words in page.commands() for word in words]
    for number, word in named:
        if is_missing(word) and word not in written:
            yield number, f"{word}: no such file"


@functools.cache
def words_of_code() -> set:
    suffixes = (".py", ".sh", ".slurm", ".jinja", ".json", "Makefile", "tests/conftest.py")
    names = [n for n in tracked() if n.endswith(suffixes) and not re.match(r"tests/\w+/test_", n)]
    return {w for n in names for w in re.findall(r"\w+", (PROJECT / n).read_text("utf-8"))}


@every_page
def test_diffs_and_make_targets(page):
    problems(page, stale_diffs(page))
    problems(page, missing_targets(page))


def stale_diffs(page):
    """A diff shows lines of the project's files, in their order."""
    for block in page.blocks:
        rest = iter(())
        for number, line in enumerate(block.lines, block.line + 1):
            if block.language == "diff" and line.startswith("--- a/"):
                rest = iter((PROJECT / line.removeprefix("--- a/")).read_text("utf-8").splitlines())
            elif block.language == "diff" and line[:1] in (" ", "-") and line[1:] not in rest:
                yield number, f"the file does not have the line{line}"


def missing_targets(page):
    targets = re.findall(r"^([\w-]+):", (PROJECT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = [(number, text.split()) for number, text in page.spans()] + page.commands()
    for number, words in named:
        if words[0] == "make":
            missing = [w for w in words[1:] if re.fullmatch(r"[a-z-]+", w) and w not in targets]
            yield from ((number, f"make {word}: no such target") for word in missing)


@every_page
def test_environment_variables(page):
    problems(page, unknown_variables(page))


def unknown_variables(page):
    name = r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b"
    named = [(number, found) for number, text in page.spans() for found in re.findall(name, text)]
    for number, words in page.commands():
        text = " ".join(words)
        found = re.findall(r"(?<!\S)([A-Z][A-Z0-9_]*)=|\$\{?([A-Z][A-Z0-9_]*)", text)
        named += [(number, given or used) for given, used in found]
    for number, name in named:
        if name not in words_of_code() and not name.startswith(THEIR_VARIABLES):
            yield number, f"{name} is read nowhere"


@every_page
def test_names_of_keys_and_code(page):
    if page.name == "docs/COMING_FROM.md":
        return  # most of its names are of other trainers
    problems(page, unknown_names(page))


def unknown_names(page):
    """Names such as `train_loss_last` occur in the code, and `memory.peak_bytes` in OUTPUTS.md."""
    objects = {key: inner for key, (_, inner) in schema_check.table("In every", "Once").items()}
    objects |= {name: schema_check.table(f"of `{name}`") for name in ("memory", "dataset")}
    objects = {key: inner for key, inner in objects.items() if inner}
    known = words_of_code() | THEIR_NAMES | schema_check.table("").keys()
    for number, text in page.spans():
        first, _, rest = text.partition(".")
        if first in objects and re.fullmatch(r"\w+", rest):
            if rest not in objects[first]:
                yield number, f"{text} is no key of results.json"
        elif re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", text) and text not in known:
            yield number, f"{text} occurs nowhere in the code"


@every_page
def test_values(page):
    problems(page, wrong_values(page))


def wrong_values(page):
    for number, line in enumerate(page.lines, 1):
        for shown, module, name, key in documents.VALUE.findall(line):
            value = getattr(importlib.import_module(module), name)
            value = value[key] if key else value
            shown = shown.replace(",", "")
            if shown != str(value) and not (is_number(shown) and float(shown) == value):
                yield number, f"{shown}, but {module}.{name} is {value}"


def is_number(text: str) -> bool:
    return bool(re.fullmatch(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", text))


def test_code_names_existing_documents():
    named = r"\b(docs/\w+\.md)(?:#([\w-]+))?"
    for name in sorted(tracked()):
        if not name.endswith((".py", ".sh", ".slurm", ".jinja")) or name.startswith("tests/unit"):
            continue
        for page, anchor in re.findall(named, (PROJECT / name).read_text("utf-8")):
            assert page in tracked(), f"{name}: {page} does not exist"
            assert not anchor or anchor in read(page).anchors(), f"{name}: {page}#{anchor}"


def test_the_tables_of_strategies_agree_with_the_code():
    """In the script's docstring, and in tables of pages whose first cell is a strategy."""
    script = (PROJECT / "real_model_example.py").read_text("utf-8")
    for name, row in STRATEGIES.items():
        kinds = {"P": "parameters", "G": "gradients", "O": "optimizer"}
        stored = [letter + "/N" * (kind in row.sharded) for letter, kind in kinds.items()]
        [shown] = re.findall(rf"^    {name} +(\S+), +(\S+), +(\S+) ", script, re.MULTILINE)
        assert [*shown] == stored, name
        for page in PAGES:
            for line in page.prose.values():
                cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
                if cells[1:2] == [f"`{name}`"] and re.fullmatch(r"P(/N)?", cells[2]):
                    assert cells[2:5] == stored, f"{page.name}: {name}"


BAD = """# A page

1. no sentence

```
text
```

<!-- output -->
```
nothing ran
```

<!-- runnable -->
```bash
python real_model_example.py --no_such_flag
report-run runs/x --outt y
torchrun --nproc_per_nod=2 real_model_example.py
python real_model_example.py --lr high
python real_model_example.py --eval_only --no_eval
bash slurm/missing.sh $NO_SUCH_VARIABLE && make everything
```

See [there](docs/MISSING.md), [here](#no-such-title) and `--no_such_either`, `support/missing.py`,
`NO_SUCH_SETTING=1`, `no_such_key`, `memory.peak`. The median is over 4<!-- value: support.report.compare.LASTING_STEPS --> steps,
and a line is not longer than one hundred columns, so that it can be read in a narrow terminal as well.

```diff
--- a/support/tables.py
 OPTIMIZER = frozenset(["optimizer"])
 STRATEGIES = {}
```

| column | meaning |
| --- | --- |

| speed | of a step |
"""


@pytest.mark.parametrize(
    "check, found",
    [
        (wrong_markers, ["5: no marker", "10: output without", "28: no marker"]),
        (long_lines, ["26: 1"]),
        (broken_links, ["24: docs/MISSING.md: no such file", "24: #no-such-title: no such anchor"]),
        (
            unknown_flags,
            [
                "16: --no_such_flag is no flag of real_model_example.py",
                "17: --outt is no flag of scripts/report.py",
                "18: --nproc_per_nod is no flag of",
                "19: argument --lr/--learning_rate: high is not",
                "20: --eval_only and --no_eval cannot",
                "24: --no_such_either is no flag",
            ],
        ),
        (missing_files, ["24: support/missing.py: no such file", "21: slurm/missing.sh"]),
        (missing_targets, ["21: make everything: no such target"]),
        (stale_diffs, ["31: the file does not have the line STRATEGIES = {}"]),
        (unknown_variables, ["25: NO_SUCH_SETTING is read nowhere", "21: NO_SUCH_VARIABLE"]),
        (unknown_names, ["25: no_such_key occurs", "25: memory.peak is no key"]),
        (broken_tables, ["37: a row outside"]),
        (wrong_values, ["25: 4, but support.report.compare.LASTING_STEPS is 5"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_each_check_can_fail(check, found):
    lines = [f"{number}: {problem}" for number, problem in check(read("bad.md", BAD))]
    assert len(lines) == len(found)
    assert all(line.startswith(start) for line, start in zip(lines, found, strict=True)), lines
