"""The fault museum, started as a user starts it: four faults, and a patch that changes nothing."""

import re
import subprocess
import sys

import pytest
from conftest import PROJECT

from faults import bench, fault, run
from faults.catalogue import FAULTS

# One of each kind of check.
NAMES = ["mean_of_means", "double_shift", "same_order_every_epoch", "end_token_not_trained"]


@pytest.mark.slow
def test_four_faults_are_caught_and_their_checks_are_silent_without_them():
    command = [sys.executable, "-m", "faults", *NAMES, "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert re.search(rf"^✅ {name}: caught by ", done.stdout, re.MULTILINE), done.stdout
    assert "✅ seed 1 without a fault: 4 checks are silent" in done.stdout


@pytest.mark.slow
def test_a_patch_that_changes_nothing_is_not_caught(tmp_path, monkeypatch):
    [planted] = [each for each in FAULTS if each.name == "mean_of_means"]
    text = planted.patch.read_text("utf-8")
    removed = re.search(r"^-( .*)$", text, re.MULTILINE)[1]
    added = re.sub(r"^\+ .*\n", "", text, flags=re.MULTILINE)
    harmless = added.replace(f"-{removed}\n", f"-{removed}\n+{removed}  # the same\n")
    header = re.search(r"@@ -(\d+,\d+) ", harmless)[1]
    harmless = re.sub(r"@@ -\S+ \+\S+ @@", f"@@ -{header} +{header} @@", harmless)
    (tmp_path / "mean_of_means.patch").write_text(harmless)
    monkeypatch.setattr(fault, "PATCHES", tmp_path)
    with bench.workshop_in_temporary_folder() as workshop:
        results = run.run_all([planted], 0, workshop)
    assert results.missed == ["mean_of_means"] and not results.with_fault["mean_of_means"].problem
