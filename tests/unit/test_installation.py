"""pip, the container definitions and the texts of a release name the same things; machines and
Pythons on which the project is installed, and what is refused.
"""

import ast
import re
import runpy
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import PurePosixPath

import pytest
import yaml
from conftest import PROJECT
from packaging.requirements import Requirement
from packaging.version import Version
from syntax import nodes_of

from distributed_training import VERSION, about, entry_points
from distributed_training.cli.parse import parse_arguments
from distributed_training.errors import MissingRequirement
from distributed_training.strategies.deepspeed import requirements as requirements_of_strategy
from distributed_training.strategies.table import STRATEGIES

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

TOML = tomllib.loads((PROJECT / "pyproject.toml").read_text())
COMMANDS = TOML["project"]["scripts"]
INTERNAL = {"generate_docs.py", "draw_pictures.py"}  # for the project's own programs
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
        assert module == "distributed_training.entry_points"
        getattr(entry_points, function)()
    scripts = {path.name for path in (PROJECT / "scripts").glob("*.py")} - INTERNAL
    programs = ["real_model_example.py", *(f"scripts/{name}" for name in scripts)]
    expected = [[sys.executable, str(PROJECT / name), "--flag", "a b"] for name in programs]
    expected.append(["bash", str(PROJECT / "compare_strategies.sh"), "--flag", "a b"])
    assert sorted(called) == sorted(expected)
    by_path = {command[1]: name for name, command in zip(COMMANDS, called, strict=True)}
    assert by_path == {str(PROJECT / path): name for path, name in about.COMMANDS.items()}


def test_every_package_is_installed():
    """pip installs only the packages that pyproject.toml lists."""
    found = {
        ".".join(file.relative_to(PROJECT).parent.parts)
        for file in (PROJECT / "distributed_training").rglob("*.py")
    }
    listed = TOML["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted({*found, "distributed_training.project"})
    for package in found:
        assert PROJECT.joinpath(*package.split("."), "__init__.py").is_file(), package


def test_the_requirements_are_declared_once():
    dynamic = TOML["tool"]["setuptools"]["dynamic"]
    extras = dict(dynamic["optional-dependencies"])
    every = extras.pop("all")["file"]
    assert sorted(every) == sorted(file for extra in extras.values() for file in extra["file"])
    files = {str(path.relative_to(PROJECT)) for path in (PROJECT / "requirements").iterdir()}
    assert files == {*dynamic["dependencies"]["file"], *every}
    assert not [key for key in ("dependencies", "optional-dependencies") if key in TOML["project"]]


def test_there_is_one_version(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--version"])
    assert capsys.readouterr().out == f"distributed-training {VERSION}\n"
    assert TOML["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "distributed_training.about.VERSION"
    }
    changes = (PROJECT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    assert released[0] == (citation["version"], str(citation["date-released"]))
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


PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# Names of packages whose modules have other names.
PACKAGES = {"httpx": "huggingface_hub", "markupsafe": "jinja2", "yaml": "PyYAML"}
OF_LLAMA_CPP = {"gguf", "llama_cpp"}  # tools/hand_over imports them next to llama.cpp
# Imported only if the user has installed them, or asks for what needs them.
OPTIONAL = {"bitsandbytes", "peft", "tensorboard", "wandb"}
# Launched or named by users, or needed by a library, but imported nowhere.
NOT_IMPORTED = {"accelerate", "ninja"}


def requirements(file: str, python: str = "3.11") -> dict[str, Requirement]:
    """The requirements of a file on a Python, by name, with those of the files that it includes."""
    lines = (PROJECT / file).read_text().splitlines()
    found = [Requirement(line) for line in lines if line[:1].isalpha()]
    for included in (line.removeprefix("-r ") for line in lines if line.startswith("-r ")):
        found += requirements(included, python).values()
    environment = {"python_version": python}
    chosen = [r for r in found if r.marker is None or r.marker.evaluate(environment)]
    by_name = {r.name: r for r in chosen}
    assert len(by_name) == len(chosen), f"{file} has two lines for one package on Python {python}"
    return by_name


def imported_packages() -> set[str]:
    """The third-party packages that the programs import, also inside functions."""
    files = [PROJECT / "real_model_example.py", *(PROJECT / "scripts").glob("*.py")]
    files += [*(PROJECT / "distributed_training").rglob("*.py")]
    in_clone = {"benchmarks", "faults"}  # they need what `make setup-dev` installs
    files += [f for f in (PROJECT / "tools").rglob("*.py") if not in_clone & {*f.parts}]
    names = set()
    for node in (node for file in files for node in nodes_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    own = {
        "distributed_training",
        "tools",
        *(path.stem for path in (PROJECT / "scripts").glob("*.py")),
    }
    return names - set(sys.stdlib_module_names) - own


def test_every_imported_package_is_declared():
    needed = {PACKAGES.get(name, name) for name in imported_packages() - OF_LLAMA_CPP}
    declared, for_tests = requirements("requirements.txt"), requirements("requirements-dev.txt")
    assert needed - set(declared) == needed & OPTIONAL
    assert set(for_tests) >= OPTIONAL
    assert set(declared) - needed == NOT_IMPORTED


@pytest.mark.parametrize("python", PYTHONS)
def test_tested_versions_are_within_the_bounds_on_every_python(python):
    tested, lower = requirements("constraints.txt", python), requirements("constraints-lower.txt")
    for name, bound in requirements("requirements.txt", python).items():
        if name in tested:
            (pin,) = tested[name].specifier
            assert bound.specifier.contains(pin.version), name
        (oldest,) = (s.version for s in bound.specifier if s.operator == ">=")
        (pin,) = lower[name].specifier
        assert Version(pin.version) == Version(oldest), name


@pytest.mark.parametrize("program", ["real_model_example.py", "scripts/plan_memory.py"])
def test_windows_is_refused_with_one_line(monkeypatch, capsys, program):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delitem(sys.modules, "distributed_training")  # so that the program imports it again
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(PROJECT / program), run_name="__main__")
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and err.count("\n") == 1 and "WSL" in err


def pretend(monkeypatch, deepspeed: str | None):
    """Let the installed DeepSpeed be another release; None: none is installed."""

    def installed(name):
        if name != "deepspeed":
            return real(name)
        if deepspeed is None:
            raise PackageNotFoundError(name)
        return deepspeed

    real = requirements_of_strategy.version
    monkeypatch.setattr(requirements_of_strategy, "version", installed)


def test_old_releases_are_refused_on_a_cpu(monkeypatch):
    """Otherwise all ranks would fail: fsdp in the first backward pass, infinity at its start."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("distributed_training.strategies.deepspeed.ops.is_compiled", lambda _: True)
    monkeypatch.setattr("torch.cpu.Stream", type("Stream", (), {"record_event": None}))
    pretend(monkeypatch, "0.19.8")
    for strategy in STRATEGIES.values():
        strategy.check_requirements(1)
    monkeypatch.setattr("torch.cpu.Stream", type("Stream", (), {}))
    pretend(monkeypatch, "0.19.3")
    for name, package in (("fsdp", "torch"), ("infinity", "deepspeed")):
        with pytest.raises(MissingRequirement, match=f"--upgrade '?{package}"):
            STRATEGIES[name].check_requirements(1)
    STRATEGIES["zero3"].check_requirements(1)


def test_a_torch_that_converts_sharded_integers_is_refused(monkeypatch):
    """It would compute with other weights."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    def converts_floats(self, mp_policy):
        return self.orig_dtype.is_floating_point

    monkeypatch.setattr(FSDPParam, "init_dtype_attrs", converts_floats)
    STRATEGIES["fsdp"].check_4bit()
    monkeypatch.setattr(FSDPParam, "init_dtype_attrs", lambda self, mp_policy: None)
    STRATEGIES["dp"].check_4bit()
    with pytest.raises(MissingRequirement, match="under fsdp needs a torch that shards integers"):
        STRATEGIES["fsdp"].check_4bit()


def test_old_deepspeed_needs_nvcc_on_a_gpu(monkeypatch, tmp_path):
    """It calls nvcc when it is imported; ROCm's builds of torch have none."""
    check, toolkit = requirements_of_strategy.check_gpu_support, tmp_path / "bin" / "nvcc"
    monkeypatch.setattr("torch.version.cuda", "12.6")
    pretend(monkeypatch, "0.18.6")
    for home in (None, str(tmp_path)):
        monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", home)
        with pytest.raises(MissingRequirement, match=r"0\.18\.6.*nvcc"):
            check()
    toolkit.parent.mkdir()
    toolkit.touch()
    check()
    toolkit.unlink()
    monkeypatch.setattr("torch.version.cuda", None)
    check()
    monkeypatch.setattr("torch.version.cuda", "12.6")
    pretend(monkeypatch, "0.19.0")
    check()


OF_DEEPSPEED = {name for name, strategy in STRATEGIES.items() if strategy.engine == "deepspeed"}
# The strategies that a release trains wrongly on any device, and those that fail on a CPU only.
WRONG = {
    **dict.fromkeys(["0.17.6", "0.18.0", "0.18.1", "0.18.2"], ({"zero2"}, set())),
    "0.18.3": (OF_DEEPSPEED, set()),
    **dict.fromkeys(["0.18.7", "0.18.8", "0.18.9"], (set(), {"zero1", "zero2", "offload"})),
}
RELEASES = [
    f"0.{minor}.{patch}"
    for minor, patches in ((17, 7), (18, 10), (19, 9))
    for patch in range(patches)
]


def refused(release: str, on_cpu: bool, monkeypatch, accumulation: int = 2) -> set[str]:
    """The strategies that are refused under a release of DeepSpeed."""
    pretend(monkeypatch, release)
    found = set()
    for name in OF_DEEPSPEED:
        strategy = STRATEGIES[name]
        try:
            requirements_of_strategy.check_release(
                strategy.stage, strategy.offloads, accumulation, on_cpu
            )
        except MissingRequirement as error:
            assert str(Version(release)) in str(error) and "pip install" in str(error)
            found.add(name)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_release_that_trains_wrongly_is_excluded_and_refused(release, monkeypatch):
    """The others are neither; a cluster's build of a release is that release."""
    bound = requirements("requirements.txt")["deepspeed"].specifier
    assert bound.contains(release) == (release not in WRONG)
    anywhere, on_cpu = WRONG.get(release, (set(), set()))
    for build in (release, f"{release}+4f2a1bc", f"{release}.post1"):
        assert refused(build, False, monkeypatch) == anywhere, build
        assert refused(build, True, monkeypatch) == anywhere | on_cpu, build
    # The oldest releases add only two micro-batches right under offload.
    offload = {"offload"} if Version(release) < Version("0.19") else set()
    assert refused(release, False, monkeypatch, accumulation=3) == anywhere | offload


def test_a_pre_release_is_refused_with_the_release_before_it(monkeypatch):
    assert refused("0.18.4rc1", False, monkeypatch) == OF_DEEPSPEED
    assert refused("0.18.3.dev5+g12", False, monkeypatch) == OF_DEEPSPEED | {"zero2"}
    assert refused("0.19.9rc1", True, monkeypatch) == set()


def test_without_deepspeed_its_absence_is_the_error(monkeypatch):
    """Not a message about its release."""
    pretend(monkeypatch, None)
    for name in OF_DEEPSPEED:
        strategy = STRATEGIES[name]
        requirements_of_strategy.check_release(strategy.stage, strategy.offloads, 4, True)
    requirements_of_strategy.check_nvme_on_cpu()
