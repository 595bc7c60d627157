"""pip, the container definitions, the notebook, and the texts of a release name the same things."""

import re
import subprocess
import sys
from pathlib import PurePosixPath

import yaml
from conftest import PROJECT

from support import VERSION, entry_points

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

TOML = tomllib.loads((PROJECT / "pyproject.toml").read_text())
COMMANDS = TOML["project"]["scripts"]
INTERNAL = {"trainer_step.py", "generate_docs.py"}  # for the project's own programs
DOCKERFILE = (PROJECT / "Dockerfile").read_text()
APPTAINER = (PROJECT / "apptainer.def").read_text()
PIP = r"pip (install.*?)(?: &&|$)"


def section(name: str) -> str:
    """A section of apptainer.def."""
    return re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", APPTAINER, re.DOTALL | re.MULTILINE)[1]


def test_each_program_of_the_user_is_a_command(monkeypatch):
    """The process becomes the interpreter that runs the program with the same arguments."""
    called = []
    monkeypatch.setattr("os.execvp", lambda _file, command: called.append(command))
    monkeypatch.setattr("sys.argv", ["name", "--flag", "a b"])
    monkeypatch.delenv("PYTHON", raising=False)
    for target in COMMANDS.values():
        module, _, function = target.partition(":")
        assert module == "distributed_training.support.entry_points"
        getattr(entry_points, function)()
    scripts = {path.name for path in (PROJECT / "scripts").glob("*.py")} - INTERNAL
    programs = ["real_model_example.py", *(f"scripts/{name}" for name in scripts)]
    expected = [[sys.executable, str(PROJECT / name), "--flag", "a b"] for name in programs]
    expected.append(["bash", str(PROJECT / "compare_strategies.sh"), "--flag", "a b"])
    assert sorted(called) == sorted(expected)


def test_the_requirements_are_declared_once():
    dynamic = TOML["tool"]["setuptools"]["dynamic"]
    extras = dict(dynamic["optional-dependencies"])
    every = extras.pop("all")["file"]
    assert sorted(every) == sorted(file for extra in extras.values() for file in extra["file"])
    files = {str(path.relative_to(PROJECT)) for path in (PROJECT / "requirements").iterdir()}
    assert files == {*dynamic["dependencies"]["file"], *every}
    lines = [line for file in files for line in (PROJECT / file).read_text().splitlines()]
    names = [re.split(r"\W", line)[0] for line in lines if line[:1].isalpha()]
    assert len(names) == len(set(names)) > 10
    assert not [key for key in ("dependencies", "optional-dependencies") if key in TOML["project"]]


def test_there_is_one_version():
    command = [sys.executable, PROJECT / "real_model_example.py", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"distributed-training {VERSION}\n"
    assert TOML["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "support.VERSION"}
    assert "version" in TOML["project"]["dynamic"]


def test_changelog_and_citation_name_the_version():
    changes = (PROJECT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert released[0] == (VERSION, str(citation["date-released"]))
    assert citation["version"] == VERSION


def test_the_images_are_the_same():
    """Both definitions have the same base, Debian packages, Python packages and checks."""
    base = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE, re.MULTILINE)[1]
    assert re.fullmatch(r"debian:\d+\.\d+-slim", base) and f"\nFrom: {base}\n" in APPTAINER
    texts = [re.sub(r"\s*\\\n\s*", " ", text) for text in (DOCKERFILE, section("post"))]
    debian = [{*re.search(r"--no-install-recommends ([^&\n]*)", t)[1].split()} for t in texts]
    assert debian[0] == debian[1] >= {"build-essential", "libaio-dev", "python3-venv"}
    pip = [[" ".join(line.split()) for line in re.findall(PIP, t, re.MULTILINE)] for t in texts]
    assert pip[0] == pip[1]
    for file in re.findall(r"(?:-r|-c) (\S+)", " ".join(pip[0])):
        assert (PROJECT / file).is_file(), file


def test_the_image_does_not_run_as_root():
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert users and int(users[-1]) > 0 and f"--uid {users[-1]} " in DOCKERFILE
    # Docker gives a new volume the owner of the folder in the image.
    owner, folders = re.search(
        r"install -d -o (\d+) -g \1 (.*) \\$", DOCKERFILE, re.MULTILINE
    ).groups()
    volumes = re.findall(r" -v \w+:(\S+)", (PROJECT / "docs/CLUSTER.md").read_text())
    written = [str(PurePosixPath("/project", folder)) for folder in folders.split()]
    assert owner == users[-1] and volumes == written
