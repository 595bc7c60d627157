"""Machines and Pythons on which the project is installed: what is declared, and what is refused."""

import ast
import subprocess
import sys

import pytest
from conftest import PROJECT
from packaging.requirements import Requirement
from packaging.version import Version
from syntax import nodes_of

from support.errors import MissingRequirement
from support.strategies import requirements as requirements_of_strategy
from support.tables import STRATEGIES

PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
# Names of packages whose modules have other names.
PACKAGES = {"httpx": "huggingface_hub", "markupsafe": "jinja2", "yaml": "PyYAML"}
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
    files = [PROJECT / "real_model_example.py"]
    files += [*(PROJECT / "support").rglob("*.py"), *(PROJECT / "scripts").glob("*.py")]
    names = set()
    for node in (node for file in files for node in nodes_of(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    own = {"support", *(path.stem for path in (PROJECT / "scripts").glob("*.py"))}
    return names - set(sys.stdlib_module_names) - own


def test_every_imported_package_is_declared():
    needed = {PACKAGES.get(name, name) for name in imported_packages()}
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
def test_windows_is_refused_with_one_line(program):
    code = f"import runpy, sys; sys.platform = 'win32'; sys.argv = [{program!r}]; "
    code += f"runpy.run_path({program!r}, run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and "WSL" in run.stderr


def test_no_build_of_torch_is_chosen_for_an_amd_gpu(tmp_path):
    """PyPI's builds cannot use it: the user names one."""
    command = ["make", "-C", str(PROJECT), "setup", "GPU_VENDOR=amd", f"VENV={tmp_path}/venv"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode != 0 and "TORCH=" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_old_releases_are_refused_on_a_cpu(monkeypatch):
    """Otherwise all ranks would fail: fsdp in the first backward pass, infinity at its start."""
    check = requirements_of_strategy.check_cpu_support
    monkeypatch.setattr("torch.cpu.Stream", type("Stream", (), {"record_event": None}))
    monkeypatch.setattr(requirements_of_strategy, "version", lambda name: "0.19.8")
    for strategy in STRATEGIES.values():
        check(strategy)
    monkeypatch.setattr("torch.cpu.Stream", type("Stream", (), {}))
    monkeypatch.setattr(requirements_of_strategy, "version", lambda name: "0.19.3")
    for name, package in (("fsdp", "torch"), ("infinity", "deepspeed")):
        with pytest.raises(MissingRequirement, match=f"--upgrade '?{package}"):
            check(STRATEGIES[name])
    check(STRATEGIES["offload"])
