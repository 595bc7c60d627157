"""The fault that is not planted: a published DeepSpeed release, and what shows it.

    python -m tools.faults.deepspeed_release

pip installs DeepSpeed 0.18.2, which is not changed, into a temporary folder. Then three programs
train under ZeRO-2 with four micro-batches a step:

1. a plain loop (tools/faults/deepspeed_loop.py), with that release and with the installed one
2. this project, which refuses that release
3. a copy of this project without the refusal, compared with dp

Exit codes: 0 if all of them show the fault, and none shows one with the installed release; also 0
if pip cannot download the release; 1 if not.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from distributed_training import programs
from distributed_training.cli.parser import Parser
from distributed_training.errors import EXIT_COMPLETED, EXIT_FAILED, TrainingError
from distributed_training.records.agreement import TOLERANCES, relative
from distributed_training.strategies.deepspeed.requirements import deepspeed_release
from tools.faults.bench import Bench, Ended, Workshop, workshop_in_temporary_folder
from tools.faults.checks import DP, ZERO2, Compare
from tools.faults.fault import Fault, Report

RELEASE = "0.18.2"
PIP_SECONDS = 300
LOOP = "tools/faults/deepspeed_loop.py"
# Does not change what is wrong: it switches off the refusal of the release.
DEEPSPEED_RELEASE = Fault(
    "deepspeed_release",
    "loss and gradients",
    f"DeepSpeed {RELEASE}, as published: ZeRO-2 keeps only the last micro-batch's gradients.",
    (
        Report(
            "deepspeedai/DeepSpeed",
            7718,
            "Since 0.17.6, ZeRO-2 computes wrong gradients; a norm of 4.74 became 1.63",
        ),
        Report(
            "huggingface/trl",
            4540,
            "ZeRO-2 trains worse than ZeRO-1 with DeepSpeed 0.18.2; 0.18.3 repaired it",
        ),
        Report(
            "huggingface/accelerate",
            3877,
            "With ZeRO-2, accumulating gradients gives a higher loss",
        ),
    ),
    "The loss of step 1 is right. Then it falls as with a quarter of the batch: with more noise.",
    Compare(DP, ZERO2, "A is dp and B zero2, both with four micro-batches"),
    "Print the gradient norm of step 1 with four micro-batches, and with one micro-batch of the "
    "same sequences: they must agree up to rounding.",
)


class Release(NamedTuple):
    """A release of DeepSpeed."""

    name: str
    packages: Path | None  # a folder with it; None: it is the installed one


class ReleaseBench(Bench):
    """A bench whose programs import a release of DeepSpeed."""

    release: Release

    @property
    def python(self) -> Path:
        """A fresh interpreter for another release: the fast one has imported the installed one."""
        return Path(sys.executable) if self.release.packages else super().python

    def _start(
        self, command: list[str], env: dict[str, str] | None = None, folder: Path | None = None
    ) -> Ended:
        variables = dict(env or {})
        if self.release.packages:
            variables["PYTHONPATH"] = f"{self.release.packages}:{os.environ['PYTHONPATH']}"
        return super()._start(command, variables, folder)

    def norms_of_loop(self) -> list[tuple[float, float]]:
        """Return the gradient norms of the loop's steps: whole batch, and ZeRO-2.

        Raises:
            TrainingError: the loop failed.
        """
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        ended = self._start([*launcher, str(self.project / LOOP)])
        lines = re.findall(r"norm ([\d.]+) whole batch, ([\d.]+) ZeRO-2", ended.output)
        if ended.code or not lines:
            raise TrainingError(f"{LOOP} failed: {ended.output[-2000:]}")
        return [(float(whole), float(zero2)) for whole, zero2 in lines]


def show(workshop: Workshop, seed: int) -> dict[str, Any]:
    """Show the fault, and print what each program says.

    Returns:
        What results.json contains; {"skipped": why} without the release.
    Raises:
        TrainingError: a program failed, or one of them does not show the fault.
    """
    installed = Release(str(deepspeed_release()), None)
    try:
        wrong = Release(RELEASE, download(workshop.folder / "packages"))
    except TrainingError as error:
        print(f"⚠️  DeepSpeed {RELEASE} is not shown: {error}", flush=True)
        return {"skipped": str(error)}
    found: dict[str, Any] = {"release": RELEASE, "installed": installed.name, "loop": {}}
    loops = workshop.folder / "loops"
    for release in (installed, wrong):
        bench = bench_of(release, workshop, workshop.clean, seed, loops / release.name)
        norms = found["loop"][release.name] = bench.norms_of_loop()
        differ = differing_steps(norms)
        if bool(differ) != (release is wrong):
            raise TrainingError(f"{LOOP} with DeepSpeed {release.name}: {norms}")
        whole, zero2 = norms[0]
        mark = "❌" if differ else "✅"
        text = f"{LOOP}, DeepSpeed {release.name}: gradient norm of step 1 {whole} whole batch"
        print(f"{mark} {text}, {zero2} ZeRO-2", flush=True)
    refused = bench.start(ZERO2, bench.folder / "refused")
    if not refused.code or RELEASE not in refused.error:
        raise TrainingError(f"The project does not refuse {RELEASE}: {refused.output[-2000:]}")
    found["refusal"] = re.sub(r"^❌ | \[rank .*", "", refused.error)
    print(f"✅ Refused by the project, exit code {refused.code}: {found['refusal']}", flush=True)
    return found | check_without_refusal(wrong, installed, workshop, seed)


def check_without_refusal(
    wrong: Release, installed: Release, workshop: Workshop, seed: int
) -> dict[str, Any]:
    """Run the check on a copy without the refusal: it must show the fault of one release only.

    Raises:
        TrainingError: it does not show it, or finds something with the installed release, too.
    """
    project = workshop.plant(DEEPSPEED_RELEASE.patch)
    findings = []
    for release in (wrong, installed):
        bench = bench_of(release, workshop, project, seed, project.parent / release.name)
        finding = DEEPSPEED_RELEASE.check(bench)
        text = f"Without the refusal, DeepSpeed {release.name}: {finding.evidence}"
        if finding.caught != (release is wrong):
            raise TrainingError(text)
        print(f"✅ {text}", flush=True)
        findings.append(finding)
    shown, silent = findings
    found = {"by": shown.by, "step": shown.step, "evidence": shown.evidence}
    return found | {"silent": silent.evidence}


def bench_of(
    release: Release, workshop: Workshop, project: Path, seed: int, folder: Path
) -> ReleaseBench:
    """Return a bench whose programs import a release."""
    bench = ReleaseBench(workshop, project, seed, folder)
    bench.release = release
    return bench


def differing_steps(norms: list[tuple[float, float]]) -> list[int]:
    """Return the steps whose norms differ more than rounding explains."""
    limit = TOLERANCES["fp32"].grad_norm
    return [step for step, pair in enumerate(norms, 1) if relative(*pair) > limit]


def download(target: Path) -> Path:
    """Install the release into a folder, without what it needs: that is installed.

    Raises:
        TrainingError: pip could not do it.
    """
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1", "--timeout=15"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]
    try:
        done = subprocess.run(
            [*command, f"deepspeed=={RELEASE}"],
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise TrainingError(f"pip has not finished after {PIP_SECONDS} s.") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        said = (errors or ["ERROR: no message"])[-1].removeprefix("ERROR: ")
        raise TrainingError(f"pip cannot download it; it needs a network. pip says: {said}")
    return target


def main() -> int:
    """Show the fault, and return the exit code."""
    Parser.of_script(__doc__).parse_args()
    try:
        with workshop_in_temporary_folder() as workshop:
            show(workshop, seed=0)
    except TrainingError as error:
        print(f"❌ {error}")
        return EXIT_FAILED
    return EXIT_COMPLETED


if __name__ == "__main__":
    programs.run_command_line(main)
