"""The fault museum, started as a user starts it: four faults, and patches that change nothing."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from conftest import PROJECT

from tools.faults import bench, fault, run
from tools.faults.catalogue import FAULTS

# Five of the nine kinds of check: Compare and Prove, Resume, Reload, CountedTokens. A harmless patch
# is for a sixth, CountedParameters. `make faults` runs all.
NAMES = ["mean_of_means", "dropout_repeats", "unscaled_merge", "tokens_times_ranks"]


@pytest.mark.slow
def test_four_faults_are_caught_and_their_checks_are_silent_without_them():
    command = [sys.executable, "-m", "tools.faults", *NAMES, "--seeds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in NAMES:
        assert re.search(rf"^✅ {name}: caught by ", done.stdout, re.MULTILINE), done.stdout
    assert "✅ seed 1 without a fault: 5 checks are silent" in done.stdout


def harmless(text: str) -> str:
    """A patch that adds a comment after the first line of the first hunk, and nothing else."""
    head, number, line, after = re.match(
        r"(.*?\n)@@ -(\d+),.*?\n (.*?)\n( .*?\n)", text, re.DOTALL
    ).groups()
    return f"{head}@@ -{number},2 +{number},2 @@\n-{line}\n+{line}  # the same\n{after}"


@pytest.mark.slow
def test_a_patch_that_changes_nothing_is_not_caught(tmp_path, monkeypatch):
    names = ["mean_of_means", "parameters_of_placeholders"]
    planted = [each for each in FAULTS if each.name in names]
    for each in planted:
        (tmp_path / each.patch.name).write_text(harmless(each.patch.read_text("utf-8")))
    monkeypatch.setattr(fault, "PATCHES", tmp_path)
    with bench.workshop_in_temporary_folder() as workshop:
        results = run.run_all(planted, 0, workshop)
    assert results.missed == names
    assert not any(outcome.problem for outcome in results.with_fault.values())


@pytest.mark.slow
def test_prove_finds_the_accumulation_by_one_process():
    [planted] = [each for each in FAULTS if each.name == "mean_of_means"]
    [check] = planted.also
    before = dict(os.environ)
    with bench.workshop_in_temporary_folder() as workshop:
        outcome = run.run_with_fault(workshop, replace(planted, check=check, also=(), curve=None))
    assert not outcome.problem and os.environ["TMPDIR"] == before["TMPDIR"]
    found = outcome.findings[check]
    assert found.caught and "1 process, 8 × 1 accumulated: not equal in loss" in found.evidence
