"""The documents follow their conventions, and what they name exists. See helpers/documents.py."""

import functools
import importlib
import re

import documents
import pytest
import schema_check
from documents import MARKERS, PROJECT, flags_of, is_missing, parser_of, read, tracked

from distributed_training.strategies.table import STRATEGIES

PAGES = [page for page in documents.pages() if page.name != "CHANGELOG.md"]
NAMES = [page.name for page in PAGES]
MOST_PAGES, MOST_LINES = 14, 2848  # in docs/, and with README.md, see `written_lines`
GENERATED = {"docs/FLAGS.md", "docs/FAULTS.md"}
LONGEST_README = 150
LONGEST_SENTENCE, LONGEST_CELL = 35, 40  # in words; inline code counts as one
# Flags, files and variables of other programs, and what commands write under their own names.
THEIR_FLAGS = {
    *(
        "--no-requeue",
        "--kill-on-bad-exit",
        "--cpus-per-task",
        "--gpus-per-node",
        "--gpus-per-task",
        "--nodes",
    ),
    *("--ntasks", "--ntasks-per-node", "--gres", "--signal", "--time", "--eos_token"),
    *("--exclude", "--export"),
}
THEIR_FILES = {
    "run_clm.py",
    "run_clm_no_trainer.py",
    "train_distributed.py",
    "scripts/run_training.sh",
    "scripts/slurm_job.sh",
}
THEIR_NAMES = {"use_multi_rank_bucket_allreduce", "dp_fp16"}
THEIR_VARIABLES = (
    *("CUDA_", "GLOO_", "HF_", "NCCL_", "OMP_", "PET_", "PIP_", "PYTORCH_", "SLURM_", "TORCH_"),
    "WANDB_",
)

# Functions that yield (line number, problem) of a page.


def wrong_markers(page):
    before = ""
    for block in page.blocks:
        if block.marker not in MARKERS and not block.marker.startswith("file: "):
            yield block.line, f"no marker before the fence ({', '.join(MARKERS)}, file: NAME)"
        if block.marker == "output" and before not in ("runnable", "output"):
            yield block.line, "output without a runnable block before it: use illustration"
        before = before if block.marker.startswith("file: ") else block.marker


@functools.cache
def every_flag() -> set:
    programs = [n for n in tracked() if re.fullmatch(r"scripts/\w+\.py", n)]
    programs = {*programs, "tools/benchmarks/peers.py", "tools/benchmarks/gpu_check.py"}
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
    names = [n for n in tracked() if n.endswith(suffixes) and not re.match(r"tests/.+/test_", n)]
    return {w for n in names for w in re.findall(r"\w+", (PROJECT / n).read_text("utf-8"))}


def stale_diffs(page):
    """A diff shows lines of the project's files, in their order."""
    for block in page.blocks:
        rest = iter(())
        for number, line in enumerate(block.lines, block.line + 1):
            if block.language == "diff" and line == "--- /dev/null":  # a new file
                rest = iter(["-- /dev/null"])
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


def unknown_names(page):
    """Names such as `train_loss_last` and `NUM_GPUS` occur in the code or in OUTPUTS.md."""
    known = words_of_code() | THEIR_NAMES | schema_check.table("").keys()
    foreign = page.name == "docs/COMING_FROM.md"  # most of its names are of other trainers
    for number, text in page.spans():
        is_name = re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", text) and not foreign
        names = [text] if is_name else re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", text)
        for name in names:
            if name not in known and not name.startswith(THEIR_VARIABLES):
                yield number, f"{name} occurs nowhere in the code"


def wrong_values(page):
    for number, line in enumerate(page.lines, 1):
        for shown, module, name, key in documents.VALUE.findall(line):
            value = getattr(importlib.import_module(module), name)
            value = value[key] if key else value
            shown = shown.replace(",", "")
            if shown != str(value) and not (NUMBER.fullmatch(shown) and float(shown) == value):
                yield number, f"{shown}, but {module}.{name} is {value}"


def sentences(page):
    """Yield (line of its paragraph, words) of each sentence of the prose."""
    first, text = 0, ""
    for number in range(1, len(page.lines) + 2):
        line = page.prose.get(number, "")
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        if item or not line.strip() or line.startswith(("|", "#", "<", "[")):
            for sentence in re.split(r"(?<=[.!?])[)\"*]*\s+", plain(text)):
                yield first, sentence.split()
            first, text = number, line[item.end() :] if item else ""
            if line.startswith("[") and "]: " not in line:
                text = line  # a link begins the paragraph
        else:
            first, text = first if text else number, f"{text} {line.strip()}"


def plain(text: str) -> str:
    """Return a text in which inline code is one word, and links have no targets."""
    text = re.sub(r"`[^`]+`", "code", re.sub(r"\][(\[][^)\]]*[)\]]", "]", text))
    return " ".join(word for word in text.split() if re.search(r"\w", word))


def long_sentences(page):
    for number, words in sentences(page):
        if len(words) > LONGEST_SENTENCE:
            yield number, f"a sentence of {len(words)} words: {' '.join(words[:8])} …"


def long_cells(page):
    for number, line in page.prose.items():
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else []
        lengths = [len(plain(cell).split()) for cell in cells]
        yield from ((number, f"a cell of {n} words") for n in lengths if n > LONGEST_CELL)


NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")
BAD = """# A page

```
text
```

<!-- runnable -->
```bash
python real_model_example.py --no_such_flag
torchrun --nproc_per_nod=2 real_model_example.py
python real_model_example.py --eval_only --no_eval
bash slurm/missing.sh && make everything
```

See `--no_such_either`, `distributed_training/missing.py`,
`NO_SUCH_SETTING=1`. It has 4<!-- value: tools.prove.prove.SEQUENCES --> rows.

```diff
--- a/distributed_training/known_models.py
+STRATEGIES = {}
 STRATEGIES = {}
```

Short. A [linked](target.md) sentence of very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very many words.

| a cell | of very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very very many words |
"""
# Each check, and the lines of BAD that it finds.
CHECKS = {
    wrong_markers: [3, 18],
    unknown_flags: [9, 10, 11, 15],
    missing_files: [15, 12],
    missing_targets: [12],
    stale_diffs: [21],
    unknown_names: [16],
    wrong_values: [16],
    long_sentences: [24],
    long_cells: [26],
}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_page_names_only_what_exists(page):
    found = sorted(problem for check in CHECKS for problem in check(page))
    assert not found, "\n".join(f"{page.name}:{number}: {problem}" for number, problem in found)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_each_check_can_fail(check):
    assert [number for number, _ in check(read("bad.md", BAD))] == CHECKS[check]


def written_lines(page):
    """Return the number of lines of a page that neither the code nor real runs determine.

    These are not generated, and no key of a file of a run, which schema_check.py compares.
    """
    text = re.sub(r"<!-- generated: .*?<!-- end of ", "", "\n".join(page.lines), flags=re.DOTALL)
    keys = schema_check.ROW.findall(text) if page.name == "docs/OUTPUTS.md" else []
    return len(text.splitlines()) - len(keys)


def test_there_are_few_and_short_pages():
    pages = [page for page in PAGES if page.name.startswith("docs/")]
    readme = len(read("README.md").lines)
    assert len(pages) <= MOST_PAGES and readme <= LONGEST_README
    lines = {page.name: written_lines(page) for page in pages if page.name not in GENERATED}
    assert sum(lines.values()) + readme <= MOST_LINES, lines


def test_code_names_existing_documents():
    named = r"\b(docs/\w+\.md)(?:#([\w-]+))?"
    for name in sorted(tracked()):
        if not name.endswith((".py", ".sh", ".slurm", ".jinja")) or name.startswith("tests/unit"):
            continue
        for page, anchor in re.findall(named, (PROJECT / name).read_text("utf-8")):
            assert page in tracked(), f"{name}: {page} does not exist"
            assert not anchor or anchor in read(page).anchors(), f"{name}: {page}#{anchor}"


def test_the_table_of_strategies_in_the_script_agrees_with_the_code():
    script = (PROJECT / "real_model_example.py").read_text("utf-8")
    for name, row in STRATEGIES.items():
        kinds = {"P": "parameters", "G": "gradients", "O": "optimizer"}
        stored = [letter + "/N" * (kind in row.sharded) for letter, kind in kinds.items()]
        [shown] = re.findall(rf"^    {name} +(\S+) +(\S+) +(\S+) ", script, re.MULTILINE)
        assert [*shown] == stored, name


def test_an_undocumented_key_of_the_files_of_a_run_is_found():
    record = {"step": 1, "eval_loss": 1.0, "perplexity": 2.7, "bits_per_byte": None}
    assert [*schema_check.problems_of_metrics(record)] == []
    assert len([*schema_check.problems_of_metrics(record | {"eval_loss": "1", "x": 1})]) == 2
    found = [*schema_check.problems_of_results({"status": "failed", "steps": True, "y": 1})]
    assert {"seed is missing", "steps is True, not int"} <= {*found}
    assert "eval_loss is missing" not in found and "y is not in OUTPUTS.md" in found
