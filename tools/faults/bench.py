"""Copies of the project, with or without a fault, and the runs of their programs.

A run must cost about a second. So the model is tiny, and the programs are forks of an interpreter
that has imported the libraries (tests/helpers/preloaded.py).
"""

from __future__ import annotations

import compileall
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import NamedTuple

from distributed_training import PROJECT
from distributed_training.errors import TrainingError, UserError
from distributed_training.files.atomic import TemporaryFolder

sys.path.append(str(PROJECT / "tests" / "helpers"))

import project_copy
from preloaded import Preloaded

TIMEOUT = 120  # seconds of one program
ROWS = 160  # prompts with answers
VOCABULARY, END = 512, "<|end|>"


@dataclass(frozen=True)
class Launch:
    """A run of the script.

    Args:
        flags: of the script; {model}, {text} and {pairs} stand for the files of `Bench`.
        ranks: processes; several are started by torchrun.
    """

    flags: str
    ranks: int = 1

    def __str__(self) -> str:
        launcher = f"torchrun --nproc_per_node={self.ranks}" if self.ranks > 1 else "python"
        return f"{launcher} real_model_example.py {self.flags}"


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    output: str  # what it printed
    folder: Path  # the output folder of a run

    @property
    def error(self) -> str:
        """The first line with ❌, or "" """
        return next((line for line in self.output.splitlines() if "❌" in line), "")


class Workshop:
    """A temporary folder with the clean copy of the project, the model, the data, and Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = write_text(folder / "text.txt")
        write_model(folder / "model", self.text)
        self.clean = copy_project(folder / "clean")
        # Libraries read these variables while they are imported.
        os.environ.update(environment(folder))
        self.stopped = False
        self.python = Preloaded()
        self.python.for_torchrun()

    def stop(self) -> None:
        """End the interpreters, and with them every process that they forked."""
        self.stopped = True  # an interrupted check must not start its next run
        self.python.stop()

    def plant(self, patch: Path) -> Path:
        """Return a new copy of the project with a patch."""
        target = self.folder / patch.stem / "project"
        shutil.copytree(self.clean, target)
        apply_patch(patch, target)
        return target


@contextmanager
def workshop_in_temporary_folder() -> Iterator[Workshop]:
    """Yield a workshop; then remove its folder, and restore the environment of this process."""
    temporary = TemporaryFolder(Path(gettempdir()), "fault_museum_", mode=0o700)
    before = dict(os.environ)
    try:
        workshop = Workshop(temporary.path)
        try:
            yield workshop
        finally:
            workshop.stop()
    finally:
        os.environ.clear()
        os.environ.update(before)
        temporary.remove()


class Bench:
    """A copy of the project, a seed, and a folder for the runs. Equal runs are made once."""

    def __init__(self, workshop: Workshop, project: Path, seed: int, folder: Path) -> None:
        self.workshop, self.project, self.seed = workshop, project, seed
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.files = {"model": workshop.folder / "model", "text": workshop.folder / "text.txt"}
        self.files["pairs"] = write_pairs(folder / "pairs.jsonl", workshop.text, seed)
        self._trained: dict[Launch, Path] = {}

    @property
    def python(self) -> Path:
        """The interpreter of the programs."""
        return self.workshop.python.python

    def run(self, program: str, *arguments: object, env: dict[str, str] | None = None) -> Ended:
        """Run a program of the copy, such as scripts/compare_runs.py, in the bench's folder."""
        return self._start([str(self.project / program), *map(str, arguments)], env)

    def start(self, launch: Launch, folder: Path) -> Ended:
        """Run the script with the seed of the bench; it may fail."""
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher = [*launcher, f"--nproc_per_node={launch.ranks}"] if launch.ranks > 1 else []
        script = str(self.project / "real_model_example.py")
        words = [*self.words(launch), "--output_dir", str(folder)]
        return self._start([*launcher, script, *words], folder=folder)

    def train(self, launch: Launch) -> Path:
        """Return the output folder of a completed run, which is made at the first call.

        Raises:
            TrainingError: the run failed.
        """
        if launch not in self._trained:
            name = hashlib.sha256(repr(launch).encode()).hexdigest()[:8]
            ended = self.start(launch, self.folder / name)
            if ended.code:
                reason = ended.error or ended.output[-2000:]
                raise TrainingError(f"exit code {ended.code} from {launch}: {reason}")
            self._trained[launch] = ended.folder
        return self._trained[launch]

    def words(self, launch: Launch) -> list[str]:
        """Return the flags of a run, with the names of files.

        A copy has a token cache of its own: tokens of the clean copy would hide a fault.
        """
        flags = [word.format(**self.files) for word in launch.flags.split()]
        return [*flags, "--seed", str(self.seed), "--cache_dir", str(self.folder / "cache")]

    def _start(
        self, command: list[str], env: dict[str, str] | None = None, folder: Path | None = None
    ) -> Ended:
        if self.workshop.stopped:
            raise TrainingError("interrupted")
        python = self.python
        variables = {**os.environ, "PYTHON_EXEC": str(python), **(env or {})}
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
        }
        try:
            done = subprocess.run(
                [str(python), *command],
                env=variables,
                cwd=self.folder,
                text=True,
                timeout=TIMEOUT,
                **pipes,  # type: ignore[call-overload]
            )
        except subprocess.TimeoutExpired as error:
            raise TrainingError(f"not finished after {TIMEOUT} s: {' '.join(command)}") from error
        return Ended(done.returncode, done.stdout, folder or self.folder)


# ---------------------------------------------------------------------------- copies of the project


def copy_project(target: Path) -> Path:
    """Copy the files of the project, and compile its modules.

    Raises:
        UserError: the project is not a checkout, or git is missing.
    """
    try:
        names = project_copy.project_files()
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"The museum needs git and a checkout of the project: {error}.") from error
    project_copy.copy_project(target, names)
    # Otherwise each copy would compile them again, which takes half a second of each run.
    for folder in ("distributed_training", "tools"):
        compileall.compile_dir(target / folder, quiet=1)
    return target


def apply_patch(patch: Path, target: Path, *options: str) -> None:
    """Apply a patch to a copy of the project; with the option --check only try it.

    Raises:
        UserError: the patch does not match the code.
    """
    # A copy may lie in another repository, relative to which git would read the patch.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(target.parent)}
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=target, env=env, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().replace("\n", "; ")
        raise UserError(f"{patch.name} does not apply to the code: {said}.")


# ------------------------------------------------------------------------- what the runs train on


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of all runs."""
    temporary, without = folder / "tmp", folder / "without" / "matplotlib"
    for new in (temporary, without):
        new.mkdir(parents=True)
    # A figure would take a second of each comparison.
    (without / "__init__.py").write_text('raise ImportError("left out")\n')
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "hf"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(without.parent),
        "TMPDIR": str(temporary),
    }


def write_text(file: Path) -> str:
    """Write 40,000 characters of the Python reference, which every Python carries; return them."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:40_000]
    file.write_text(text, encoding="utf-8")
    return text


def write_pairs(file: Path, text: str, seed: int) -> Path:
    """Write pairs of a prompt and an answer, which begin anywhere in the text.

    They have different lengths: if all sequences have the same, faults of a mean are invisible.
    """
    words, random, rows = re.findall("[A-Za-z]+", text), Random(seed), []
    for _ in range(ROWS):
        start = random.randrange(len(words) - 40)
        middle = start + random.randint(2, 4)
        prompt, answer = words[start:middle], words[middle : middle + random.randint(1, 14)]
        rows.append(json.dumps({"prompt": " ".join(prompt), "completion": f" {' '.join(answer)}"}))
    file.write_text("\n".join(rows), encoding="utf-8")
    return file


def write_model(folder: Path, text: str) -> None:
    """Write the configuration of a GPT-2 of 137,000 parameters, and a tokenizer of the text."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir()
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [text], vocab_size=VOCABULARY, special_tokens=[END], show_progress=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = {"model_type": "gpt2", "vocab_size": VOCABULARY, **sizes}
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 0, "eos_token_id": 0}))
