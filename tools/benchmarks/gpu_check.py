#!/usr/bin/env python3
"""Check on a GPU what the tests can only check on a CPU, and measure memory and speed.

    bash tools/benchmarks/gpu_check.sh correctness                # at most five minutes
    bash tools/benchmarks/gpu_check.sh speed                      # at most five minutes
    bash tools/benchmarks/gpu_check.sh                            # both, at most ten minutes
    bash tools/benchmarks/gpu_check.sh correctness --only "fp32 fsdp; fp32 zero3"

correctness: each strategy in fp32, with equal losses, and in bf16 and fp16; one step in several
ways (--prove); checkpoints resumed under another strategy; grouped-query attention; --compile;
--cuda_graph; adapters and 4 bit; calls that wait for the GPU; --deterministic; SIGTERM; out of
memory.

speed: gpt2 next to transformers.Trainer, with --cuda_graph, --bf16_blocks and --compile_loss as
well, the parts of a step, and measured memory next to the plan.

The most valuable checks come first. Runs that measure neither time nor free memory go four at a
time. A run has 90 seconds, and a part --part_seconds: what has not run then is reported as "not
run". No network is needed.

The report is one file, which is complete after every run: each check passed, failed (with the first
error) or did not run (with the reason). Next to it are a .json file with everything that the runs
measured, a .log file with the output of failed runs, and the trace of the profiled step. Please
report them in an issue of this repository. Without a GPU the checks that a CPU can do run as a
rehearsal, on small models, in the same order and with longer limits. Exit code: 1 if a check
failed.
"""

import argparse
import functools
import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_training.errors import MissingRequirement
from distributed_training.memory.estimate import predict
from distributed_training.memory.find_architecture import find_architecture
from distributed_training.programs import run_command_line
from distributed_training.records.metrics_file import FILE
from distributed_training.records.metrics_reader import read_metrics
from distributed_training.strategies.fsdp.strategy import FSDP
from distributed_training.units import GB, MB
from distributed_training.workload.workload import Workload
from tools.benchmarks import corpus
from tools.benchmarks.gpu_report import FAILED, Machine, Report, counts_of, describe_machine
from tools.benchmarks.gpu_tables import (
    calls_per_step,
    measurements_of,
    shares_of,
    step_peak,
    tables_of,
    trace_of,
)
from tools.benchmarks.runner import (
    PROJECT,
    SCRIPT,
    TORCHRUN,
    Check,
    Done,
    NotPossible,
    Runner,
    Runs,
    slug,
)

LIBAIO = Path("/usr/include/libaio.h")
# Relative tolerance of fp32 losses on a CPU, and on a GPU, which multiplies fp32 matrices in TF32.
FP32, TF32 = 1e-4, 1e-3
HALF = 0.01  # relative difference of 16-bit losses from fp32 losses
ADAPTERS = 0.1  # of losses with 4-bit weights
# Calls of a step for which the host may wait for the GPU. Those of DeepSpeed are upper bounds;
# zero3 on one rank waits for each parameter that it gathers, on a stream that is empty.
CALLS_LIMITS = {"dp": 1, "fsdp": 1, "zero2": 8, "zero3": None, "offload": None}
# Relative error of the memory estimate's peak; 0.1 for the other strategies.
PEAK_TOLERANCES = {"zero3": 0.15, "infinity": 0.15}
# An error that is not larger is that of fixed buffers, which matter for a small model only.
FIXED_BYTES = 32 * MB
# The strategies, the most different ones first.
STRATEGIES = ("dp", "fsdp", "zero2", "zero3", "zero1", "offload", "infinity")
# DeepSpeed's ops that a strategy needs, as the names of the checks that compile them.
OPS = {"offload": ("compile CPU Adam",), "infinity": ("compile CPU Adam", "compile async_io")}

SMALL = "--seq_length 64 --batch_size 4 --dropout 0 --logging_steps 1"  # for the embedded model
NO_FILES = "--no_eval --no_export --no_save"
ADVICE = re.compile(r"(--batch_size \d+ --gradient_accumulation_steps \d+): ([\d.]+)")
GQA_CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}

Words = Sequence[str | int | Path]  # of a command


@dataclass(frozen=True)
class Scale:
    """What the checks train: the work that is measured, or a small stand-in on a CPU."""

    model: str
    medium: str  # a larger model
    seq_length: int
    large: int  # sequences of a step
    small: int
    steps: dict[int, int]  # optimizer steps of a measured run, by sequences of a step
    peers: str  # flags of tools/benchmarks/peers.py
    eager: str  # its case of each way
    compiled: str
    run_seconds: float  # time limit of a run
    part_seconds: float  # and of a part


ON_GPU = Scale(
    model="gpt2",
    medium="gpt2-medium",
    seq_length=1024,
    large=32,
    small=4,
    steps={32: 40, 4: 100},
    peers="--gpu",
    eager="eager",
    compiled="compiled",
    run_seconds=90,
    part_seconds=290,  # of 300: the rest is for the start of this program and the end of runs
)
ON_CPU = Scale(
    model="tiny-gpt2",
    medium="tiny-gpt2",
    seq_length=256,
    large=4,
    small=2,
    steps={4: 6, 2: 6},
    peers="--precision fp32 --model tiny-gpt2",
    eager="no-dropout",
    compiled="compiled-no-dropout",
    run_seconds=900,
    part_seconds=7200,
)


# ------------------------------------------------------------------------------------- a part


class Part:
    """The checks of a part, to which the functions below add.

    Args:
        name: correctness or speed.
        root: folder of all parts, which share data and caches.
    """

    def __init__(self, name: str, machine: Machine, root: Path):
        self.name, self.machine, self.root = name, machine, root
        self.work = root / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.scale = ON_GPU if machine.on_gpu else ON_CPU
        self.checks: list[Check] = []
        self.data = root / "data" / f"{self.scale.model}-{self.scale.seq_length}"
        self.tolerance = TF32 if machine.on_gpu else FP32
        self.needs_gpu = "" if machine.on_gpu else "needs a GPU"

    def folder(self, name: str) -> Path:
        """Return the output folder of a check's run."""
        return self.work / "runs" / slug(name)

    def add(self, name: str, command: list, **how: Any) -> None:
        """Add a check that runs any command; `how` has fields of Check."""
        folder = self.folder(name)
        self.checks.append(Check(name, command, **{"folder": folder, **how}))

    def train(
        self, name: str, flags: str | Callable[[Runs], str], program: Words = (), **how: Any
    ) -> None:
        """Add a check that runs real_model_example.py in its own folder.

        Args:
            flags: are split at white space; or made from earlier runs.
            program: the first words of the command.
            how: fields of Check.
        """
        folder = how.setdefault("folder", self.folder(name))
        how = {"status": "completed", "after": ("tokens",), **how}
        start, end = program or (sys.executable, SCRIPT), ("--output_dir", folder)

        def command(runs: Runs) -> list:
            words = (flags if isinstance(flags, str) else flags(runs)).split()
            data = [] if "--dataset" in words else corpus.flags_of(self.data)
            return [*start, *words, *data, *end]

        self.checks.append(Check(name, command, **how))

    def measured(self, model: str = "") -> str:
        """Return flags of the work that is measured, without the batch: random weights, bf16."""
        scale, precision = self.scale, "bf16" if self.machine.on_gpu else "fp32"
        work = f"--model {model or scale.model} --from_scratch --seq_length {scale.seq_length}"
        return f"{work} --dropout 0 --precision {precision} {NO_FILES}"


def of_strategy(strategy: str, **how) -> dict:
    """Return fields of Check for a strategy: `how`, and the ops that it needs."""
    needs = (*how.pop("needs", ()), *OPS.get(strategy, ()))
    return {**how, "needs": needs}


# ------------------------------------------------------------------------- both parts start with

ABOUT_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
usable = torch.cuda.is_available()
nccl = ".".join(map(str, torch.cuda.nccl.version())) if usable else None
print(json.dumps([usable, torch.__version__, torch.version.cuda, nccl, gpus]))
"""


def start(part: Part) -> None:
    """Check that torch sees the GPU, and tokenize the corpus once."""

    def sees_gpu(run: Done) -> tuple[str, str]:
        usable, torch, cuda, nccl, gpus = json.loads(run.log.splitlines()[-1])
        text = f"torch {torch}, CUDA {cuda}, NCCL {nccl}, {', '.join(gpus) or 'no GPU'}"
        unused = part.machine.on_gpu and not usable
        return (f"it cannot use the GPU: {text}" if unused else ""), text

    part.add("torch", [sys.executable, "-c", ABOUT_TORCH], judge=sees_gpu)
    scale = part.scale
    count = max(size * steps for size, steps in scale.steps.items())
    words = ["--model", scale.model, "--sequences", count, "--length", scale.seq_length]
    program = [sys.executable, "-m", "tools.benchmarks.corpus"]
    part.add("tokens", [*program, part.data, *words])


def compile_ops(part: Part, after: tuple[str, ...] = ()) -> None:
    """Compile DeepSpeed's C++ ops in the background: CPU Adam, then those of infinity."""
    build, how = [sys.executable, PROJECT / "scripts" / "build_ops.py"], {"background": True}
    [adam], (_, async_io) = OPS["offload"], OPS["infinity"]
    part.add(adam, [*build, "offload"], after=after, **how)
    missing = "" if LIBAIO.exists() else "libaio-dev is not installed"
    part.add(async_io, [*build, "infinity"], needs=(adam,), blocked=missing, **how)


# ------------------------------------------------------------------------------- correctness


def correctness(part: Part) -> None:
    """Add the checks that each strategy and feature trains as it should on a GPU."""
    compile_ops(part)
    start(part)
    full_precision(part)
    prove(part, "zero3")
    half_precision(part, "bf16", STRATEGIES[:4])
    half_precision(part, "fp16", STRATEGIES[:4])
    prove(part, "fsdp", "dp")
    resume(part)
    grouped_queries(part)
    compiled(part)
    recorded(part)
    adapters(part)
    waiting_calls(part)
    determinism(part)
    stop_signal(part)
    out_of_memory(part)
    several_gpus(part)
    # If there is time left.
    half_precision(part, "bf16", STRATEGIES[4:])
    half_precision(part, "fp16", STRATEGIES[4:])
    packing(part)
    words = ["--check", "--strategy", "zero3", *corpus.flags_of(part.data)]
    part.add("--check", [sys.executable, SCRIPT, *words], after=("tokens",))


def full_precision(part: Part) -> None:
    """Each strategy has the losses of dp, saves, evaluates, generates and exports."""

    def exports(run: Done) -> tuple[str, str]:
        return ("" if list((run.folder / "hf").glob("*.safetensors")) else "no exported model"), ""

    flags = f"{SMALL} --precision fp32 --max_steps 8 --save_every 4 --eval_samples 8 --generate The"
    for strategy in STRATEGIES:
        reference = "" if strategy == "dp" else "fp32 dp"
        how = of_strategy(strategy, reference=reference, tolerance=part.tolerance, judge=exports)
        part.train(f"fp32 {strategy}", f"{flags} --strategy {strategy}", **how)


def half_precision(part: Part, precision: str, strategies: tuple[str, ...]) -> None:
    """Each strategy has in 16 bit about the losses of fp32; also FSDP with CPU offload."""
    flags = f"{SMALL} {NO_FILES} --precision {precision} --max_steps 8 --strategy"
    blocked = part.needs_gpu if precision == "fp16" else ""
    how = {"reference": "fp32 dp", "tolerance": HALF, "blocked": blocked}
    for strategy in strategies:
        name = f"{precision} {strategy}"
        part.train(name, f"{flags} {strategy}", **of_strategy(strategy, **how))
    if "fsdp" in strategies:
        config = part.work / "fsdp_offload.json"
        config.write_text('{"fsdp_offload_params": true}', encoding="utf-8")
        name = f"{precision} fsdp, CPU offload"
        part.train(name, f"{flags} fsdp --fsdp_config {config}", **how)


def prove(part: Part, *strategies: str) -> None:
    """One step in several ways, also with transformers.Trainer, is the same step."""
    for strategy in strategies:
        words = ["--prove", 1, "--strategy", strategy, "--seq_length", 64]
        command = [sys.executable, SCRIPT, *words, *corpus.flags_of(part.data)]
        part.add(f"--prove {strategy}", command, after=("tokens",))


def resume(part: Part) -> None:
    """The checkpoint of a strategy trains on under the next one, in a circle."""
    circle = ("dp", "zero3", "fsdp", "zero2", "offload", "zero1", "infinity")
    flags = f"{SMALL} --precision fp32 --max_steps 8 --no_eval --no_export --no_save"
    how = {"reference": "fp32 dp", "tolerance": part.tolerance, "after_step": 4}
    for saver, other in zip(circle, (*circle[1:], circle[0]), strict=True):
        saved = part.folder(f"fp32 {saver}") / "checkpoints" / "step-00000004"
        words = f"{flags} --strategy {other} --resume {saved}"
        needs = of_strategy(other, needs=(f"fp32 {saver}",))
        part.train(f"resume {saver} under {other}", words, **how, **needs)


def grouped_queries(part: Part) -> None:
    """A model with grouped-query attention has the same losses in each precision and compiled."""
    flags = f"{SMALL} {NO_FILES} --from_scratch --max_steps 8"
    for name, options, tolerance in (
        ("GQA, fp32", "--precision fp32", 0.0),
        ("GQA, bf16", "--precision bf16", HALF),
        ("GQA, fp32, compiled", "--precision fp32 --compile", part.tolerance),
        ("GQA, bf16, compiled", "--precision bf16 --compile", HALF),
    ):
        reference = "GQA, fp32" if tolerance else ""
        words = gqa_flags(part, f"{flags} {options}")
        part.train(name, words, reference=reference, tolerance=tolerance)


def gqa_flags(part: Part, flags: str) -> Callable[[Runs], str]:
    """Return flags of a small Qwen2 with the embedded tokenizer, once there are tokens."""

    def with_model(_: Runs) -> str:
        folder = part.work / "qwen2"
        if not folder.exists():
            found = list((part.data / "cache").glob("*-tokenizer-*"))
            if not found:
                raise NotPossible("there is no tokenizer: the tokens are missing")
            folder.mkdir()
            for file in found[0].glob("tokenizer*.json"):
                shutil.copy(file, folder)
            (folder / "config.json").write_text(json.dumps(GQA_CONFIG), encoding="utf-8")
        return f"{flags} --model {folder}"

    return with_model


def compiled(part: Part) -> None:
    """--compile has the losses of eager mode."""
    flags = f"{SMALL} {NO_FILES} --precision bf16 --max_steps 8 --compile"
    for strategy in STRATEGIES[:3]:
        how = {"reference": f"bf16 {strategy}", "tolerance": HALF}
        part.train(f"--compile {strategy}", f"{flags} --strategy {strategy}", **how)


def recorded(part: Part) -> None:
    """--cuda_graph draws the dropout of eager mode, and adds up gradients as it does."""
    flags = f"{SMALL} {NO_FILES} --precision fp32 --max_steps 8 --gradient_accumulation_steps 3"
    flags = flags.replace("--dropout 0", "--dropout 0.1")
    part.train("dropout, eager", flags)
    how = {"reference": "dropout, eager", "tolerance": FP32, "judge": was_recorded}
    flags += " --cuda_graph"
    part.train("dropout, CUDA graph", flags, blocked=part.needs_gpu, **how)


def was_recorded(run: Done) -> tuple[str, str]:
    """Judge whether a run with --cuda_graph used CUDA graphs until its end."""
    failed = [line for line in run.log.splitlines() if "--cuda_graph:" in line]
    return (failed[0] if failed else ""), ""


def adapters(part: Part) -> None:
    """LoRA trains and exports adapters; on 4-bit weights, also under fsdp, losses are similar."""

    def exports(run: Done) -> tuple[str, str]:
        file = run.folder / "hf" / "adapter_model.safetensors"
        return ("" if file.exists() else "no exported adapters"), ""

    flags = f"{SMALL} --precision bf16 --max_steps 8 --no_eval --no_save --lr 1e-3 --lora_r 8"
    part.train("LoRA", flags, judge=exports)
    missing = "" if importlib.util.find_spec("bitsandbytes") else "bitsandbytes is not installed"
    how = {"reference": "LoRA", "tolerance": ADAPTERS, "blocked": missing or part.needs_gpu}
    part.train("LoRA, 4 bit", f"{flags} --load_in_4bit", **how)
    try:
        FSDP("fsdp").check_4bit()
    except MissingRequirement as error:
        missing = missing or str(error)
    how = {"reference": "LoRA, 4 bit", "tolerance": HALF, "blocked": missing or part.needs_gpu}
    part.train("LoRA, 4 bit, fsdp", f"{flags} --load_in_4bit --strategy fsdp", **how)


def waiting_calls(part: Part) -> None:
    """The host waits for the GPU as rarely as CALLS_LIMITS allows."""
    for strategy, limit in CALLS_LIMITS.items():
        name = f"waiting calls, {strategy}"

        def few(run: Done, limit=limit) -> tuple[str, str]:
            calls = calls_per_step(json.loads((run.folder / "calls.json").read_text()))
            text = f"{calls:g} a step" + (f" (limit {limit})" if limit is not None else "")
            return (text if limit is not None and calls > limit else ""), text

        watch = [sys.executable, PROJECT / "tools" / "benchmarks" / "synchronizing_calls.py"]
        program = [*watch, part.folder(name) / "calls.json"]
        how = of_strategy(strategy, blocked=part.needs_gpu, judge=few, tables=("calls",))
        flags = f"{part.measured()} --batch_size {part.scale.small} --max_steps 20"
        part.train(name, f"{flags} --strategy {strategy}", program, **how)


def determinism(part: Part) -> None:
    """Two --deterministic runs, and one resumed at half, have exactly the same losses."""
    flags = f"--model {part.scale.model} --from_scratch --seq_length 256 --batch_size 4"
    flags += " --max_steps 8 --logging_steps 1 --no_eval --no_export --deterministic --dropout 0.1"
    part.train("--deterministic", f"{flags} --save_every 4")
    part.train("--deterministic again", f"{flags} --no_save", reference="--deterministic")
    saved = part.folder("--deterministic") / "checkpoints" / "step-00000004"
    how = {"reference": "--deterministic", "needs": ("--deterministic",), "after_step": 4}
    part.train("--deterministic resumed", f"{flags} --no_save --resume {saved}", **how)


def stop_signal(part: Part) -> None:
    """SIGTERM saves, and --resume neither repeats nor skips a step."""
    flags = f"{SMALL} --lr_scheduler constant --no_eval --no_export --max_steps"
    how = {"code": 75, "status": "preempted", "stop_after": 3}
    part.train("SIGTERM", f"{flags} 1000000", **how)

    def three_more(runs: Runs) -> str:
        return f"{flags} {max(runs['SIGTERM'].losses) + 3} --resume"

    def every_step_once(run: Done) -> tuple[str, str]:
        records, unreadable = read_metrics(run.folder / FILE)
        steps = [record["step"] for record in records if "loss" in record]
        complete = not unreadable and steps == list(range(1, run.results["steps"] + 1))
        return ("" if complete else f"logged steps: {steps}"), f"up to step {steps[-1]}"

    how = {"folder": part.folder("SIGTERM"), "needs": ("SIGTERM",), "judge": every_step_once}
    part.train("resume after SIGTERM", three_more, **how)


def out_of_memory(part: Part) -> None:
    """A too large batch exits with 3 and advice; the advised batch trains, and the halved one."""
    size = too_large_batch(part.machine.gpu_bytes)
    flags = f"{part.measured()} --batch_size {size} --max_steps 3"
    how = {"alone": True, "blocked": part.needs_gpu}

    def has_advice(run: Done) -> tuple[str, str]:
        return ("" if ADVICE.search(run.log) else "no smaller batch is advised"), f"batch {size}"

    def advised(runs: Runs) -> str:
        found = ADVICE.search(runs["out of memory"].log)
        if not found:
            raise NotPossible("no smaller batch is advised")
        return f"{part.measured()} --max_steps 3 {found[1]}"

    def peak(run: Done) -> tuple[str, str]:
        memory, work = run.results["memory"], run.results
        text = f"{work['batch_size']} × {work['gradient_accumulation_steps']} sequences, "
        return "", f"{text}peak {memory['peak_bytes'][0] / GB:.1f} GB"

    part.train("out of memory", flags, code=3, status="oom", judge=has_advice, **how)
    part.train("advice followed", advised, judge=peak, needs=("out of memory",), **how)
    part.train("--auto_micro_batch", f"{flags} --auto_micro_batch", judge=peak, **how)


def too_large_batch(gpu_bytes: int) -> int:
    """Return a batch size for which the activations alone exceed the memory of a GPU.

    It is the smallest power of two, for GPT-2 and sequences of 1,024 tokens.
    """
    model, batch = find_architecture("gpt2"), 1
    while predict(Workload(model, 1, batch, 1024), "dp").activations <= gpu_bytes:
        batch *= 2
    return batch


def several_gpus(part: Part) -> None:
    """A rank for each GPU, with torchrun and in a Slurm job with srun, has the losses of one."""
    ranks = part.machine.gpus
    if ranks < 2:
        part.train("all GPUs", "", blocked="needs several GPUs")
        return
    flags = f"{SMALL} {NO_FILES} --precision fp32 --max_steps 8"
    part.train("one GPU", f"{flags} --batch_size {2 * ranks}")
    launchers = {"torchrun": [*TORCHRUN, f"--nproc_per_node={ranks}", SCRIPT]}
    if "SLURM_JOB_ID" in os.environ:
        srun = ["srun", f"--ntasks={ranks}", "--kill-on-bad-exit=1"]
        launchers["srun"] = [*srun, sys.executable, SCRIPT]
    how = {"reference": "one GPU", "tolerance": part.tolerance, "alone": True}
    for launcher, program in launchers.items():
        for strategy in STRATEGIES[:4]:
            words = f"{flags} --batch_size 2 --strategy {strategy}"
            part.train(f"all GPUs, {launcher} {strategy}", words, program, **how)


def packing(part: Part) -> None:
    """Packed examples have the losses of the CPU, which masks attention densely."""
    rows = part.work / "rows.jsonl"
    examples = [
        {"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(400)
    ]
    text = "".join(json.dumps(example) + "\n" for example in examples)
    rows.write_text(text, encoding="utf-8")
    flags = f"{SMALL} {NO_FILES} --precision fp32 --max_steps 8 --packing --dataset {rows}"
    part.train("packing on the CPU", flags, env={"CUDA_VISIBLE_DEVICES": ""})
    part.train("packing", flags, reference="packing on the CPU", tolerance=part.tolerance)


# ------------------------------------------------------------------------------------- speed


def speed(part: Part) -> None:
    """Add the measurements of speed, and then of memory."""
    scale = part.scale
    start(part)
    next_to_trainer(part, scale.eager, scale.large)
    next_to_trainer(part, scale.eager, scale.small)
    with_cuda_graph(part)
    with_other_kernels(part)
    next_to_trainer(part, scale.compiled, scale.large)
    profile(part)
    compile_ops(part, after=("profile",))
    for strategy in ("dp", "zero1", "zero2", "zero3", "fsdp"):
        simulate(part, strategy, 8, scale.model)
    for strategy in ("dp", "zero2", "zero3"):
        simulate(part, strategy, 4, scale.medium)
    gqa_memory(part)
    for strategy in ("offload", "infinity"):
        simulate(part, strategy, 8, scale.model)
    # If there is time left.
    next_to_trainer(part, scale.compiled, scale.small)
    for strategy in ("zero1", "zero3", "fsdp", "zero2"):
        steps = scale.steps[scale.large]
        flags = f"{part.measured()} --batch_size {scale.large} --max_steps {steps}"
        name = f"{scale.large} × {scale.seq_length}, eager, {strategy}"
        part.train(name, f"{flags} --strategy {strategy}", tables=("runs",), alone=True)


def next_to_trainer(part: Part, case: str, batch_size: int) -> None:
    """Measure this project, and then transformers.Trainer with the same work."""
    scale = part.scale
    name = f"{batch_size} × {scale.seq_length}, {'compiled' if case == scale.compiled else 'eager'}"
    for program in ("ours", "Trainer"):
        # Each in a folder with its own measurements: both are round 1 of the same case.
        out = part.folder(f"{name}, {program}")
        words = f"{scale.peers} --cases {case} --only {program} --batch_size {batch_size}"
        words += f" --steps {scale.steps[batch_size]} --out {out} --data {part.data.parent}"
        command = [sys.executable, "-m", "tools.benchmarks.peers", *words.split()]
        tables = ("peers", "runs") if program == "ours" else ("peers",)
        how = {"after": ("tokens",), "alone": True, "tables": tables, "folder": out / "run"}

        def first_step(run: Done) -> tuple[str, str]:
            [measured] = measurements_of(run)
            return "", f"first step after {measured.stamps[0][1]:.0f} s"

        part.add(f"{name}, {program}", command, judge=first_step, **how)


def with_cuda_graph(part: Part) -> None:
    """Measure the small micro-batch with --cuda_graph."""
    how = {"judge": was_recorded, "blocked": part.needs_gpu}
    next_to_eager(part, part.scale.small, "CUDA graph", "--cuda_graph", **how)


def with_other_kernels(part: Part) -> None:
    """Measure both micro-batches with --bf16_blocks and with --compile_loss."""
    in_bf16 = {"tolerance": HALF, "blocked": part.needs_gpu}  # a CPU measures in fp32
    for batch_size in (part.scale.large, part.scale.small):
        next_to_eager(part, batch_size, "bf16 blocks", "--bf16_blocks", **in_bf16)
        next_to_eager(part, batch_size, "compiled loss", "--compile_loss")


def next_to_eager(part: Part, batch_size: int, title: str, flag: str, **how: Any) -> None:
    """Measure this project with another flag, with the losses of the eager run."""
    scale = part.scale
    steps, name = scale.steps[batch_size], f"{batch_size} × {scale.seq_length}, eager, ours"
    flags = f"{part.measured()} --batch_size {batch_size} --max_steps {steps} {flag}"
    # As tools/benchmarks/peers.py runs the eager one.
    flags += f" --num_samples {steps * batch_size} --logging_steps 10"
    how = {"reference": name, "tolerance": part.tolerance, **how}
    how |= {"tables": ("runs",), "alone": True}
    part.train(f"{name}, {title}", flags, **how)


def profile(part: Part) -> None:
    """Measure the parts of a step of dp: head, attention, elementwise kernels, idle time."""
    folder = part.folder("profile") / "trace"

    def has_kernels(run: Done) -> tuple[str, str]:
        if shares_of(trace_of(run)) or not part.machine.on_gpu:
            return "", ""
        return "the trace has no kernels", ""

    flags = f"{part.measured()} --batch_size {part.scale.large} --max_steps 8 --profile {folder}"
    tables = ("profile",) if part.machine.on_gpu else ()
    part.train("profile", flags, judge=has_kernels, tables=tables, alone=True)


def simulate(part: Part, strategy: str, ranks: int, model: str) -> None:
    """The peak memory of a step on one of several simulated GPUs is as planned."""
    name = f"{model} on {ranks} simulated GPUs, {strategy}"
    flags = f"{part.measured(model)} --batch_size {part.scale.small} --strategy {strategy}"
    judge = planned_peak(PEAK_TOLERANCES.get(strategy, 0.1))
    how = of_strategy(strategy, judge=judge, tables=("memory",))
    part.train(name, f"{flags} --simulate_gpus {ranks}{profiled(part)}", **how)


def gqa_memory(part: Part) -> None:
    """Grouped-query attention in fp32 stores no scores of all pairs of tokens."""
    flags = f"--from_scratch --seq_length {part.scale.seq_length} --batch_size 8 --dropout 0"
    flags += f" {NO_FILES} --precision fp32 --max_steps 8{profiled(part)}"
    how = {"judge": planned_peak(0.1), "tables": ("memory",)}
    part.train("memory of GQA in fp32", gqa_flags(part, flags), **how)


def profiled(part: Part) -> str:
    """Return the flag without which a CPU does not record the memory of a step."""
    return "" if part.machine.on_gpu else " --profile_memory"


def planned_peak(tolerance: float) -> Callable[[Done], tuple[str, str]]:
    """Return a judge of the measured peak of a step, relative to the memory estimate."""

    def judge(run: Done) -> tuple[str, str]:
        planned, peak = run.results["memory"]["predicted_bytes"]["peak"], step_peak(run.results)
        error = planned / peak - 1
        text = f"planned {planned / GB:.3f} GB, measured {peak / GB:.3f}, {error:+.1%}"
        text += f" (limit {tolerance:.0%}, or {FIXED_BYTES / GB:.3f} GB)"
        is_off = abs(error) > tolerance and abs(planned - peak) > FIXED_BYTES
        return (text if is_off else ""), text

    return judge


PARTS: dict[str, Callable[[Part], None]] = {"correctness": correctness, "speed": speed}


# ------------------------------------------------------------------------------------ program


def select(checks: list[Check], names: list[str]) -> list[Check]:
    """Return the checks with these names, and those that they depend on; all without names."""
    wanted, before = {check.name for check in checks if check.name in names}, set()
    while wanted != before:
        before = set(wanted)
        for check in checks:
            if check.name in wanted:
                wanted |= {*check.after, *check.needs, check.reference} - {""}
    return [check for check in checks if check.name in wanted] if names else checks


def make_runner(part: Part, only: list[str], seconds: float | None) -> Runner:
    """Return the runner of a part's checks, each of which has the same caches."""
    PARTS[part.name](part)
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(part.root / "huggingface")}
    env |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(PROJECT)}
    scale = part.scale
    checks = select(part.checks, only)
    return Runner(checks, part.work, seconds or scale.part_seconds, scale.run_seconds, env)


def keep_trace(work: Path, report: Path) -> None:
    """Compress the trace of the profiled step into the report's folder."""
    trace = work / "runs" / "profile" / "trace" / "trace-rank0.json"
    if trace.exists():
        kept = gzip.compress(trace.read_bytes(), compresslevel=6)
        report.with_name(f"{report.stem}-trace.json.gz").write_bytes(kept)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `parts` has all parts by default, and `only` is a list."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gpu_check.sh", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="correctness or speed (default: both)")
    add("--only", default="", help="names of checks, with ';' between; also what they depend on")
    add("--report", type=Path, help="file (default: runs/gpu_check/PART.md)")
    add("--part_seconds", type=float, help="time limit of a part (default: 290; on a CPU 7200)")
    add("--work", type=Path, help="folder of runs and logs (default: a temporary one)")
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"{unknown[0]} is not one of {', '.join(PARTS)}")
    args.parts = args.parts or [*PARTS]
    args.only = [name.strip() for name in args.only.split(";") if name.strip()]
    name = "-".join(args.parts)
    args.report = (args.report or PROJECT / "runs" / "gpu_check" / f"{name}.md").resolve()
    return args


def check(args: argparse.Namespace, command: str, work: Path) -> int:
    """Run the parts, whose report is written after each run; return the exit code."""
    machine, started = describe_machine(), time.monotonic()
    print("; ".join(machine.facts), flush=True)
    runners = {
        name: make_runner(Part(name, machine, work), args.only, args.part_seconds)
        for name in args.parts
    }
    known = {check.name for runner in runners.values() for check in runner.checks}
    if unknown := [name for name in args.only if name not in known]:
        print(f"❌ --only {unknown[0]}: no check of {', '.join(args.parts)} has this name here.")
        return 2
    args.report.parent.mkdir(parents=True, exist_ok=True)
    report = Report(args.report, command, machine, runners, tables_of)
    report.write()
    try:
        for runner in runners.values():
            runner.run(report.write)
    except BaseException as end:
        report.otherwise = f"this program was stopped: {end!r}"
        raise
    finally:
        report.write()
        for name in args.parts:
            keep_trace(work / name, args.report)
        seconds = time.monotonic() - started
        print(f"{counts_of(report.all_rows())}; {seconds:.0f} s; {args.report}", flush=True)
    return 1 if any(verdict == FAILED for _, verdict, _ in report.all_rows()) else 0


def main(argv: list[str]) -> int:
    """Run the requested parts and return the exit code."""
    args = parse(argv)
    command = shlex.join(["bash", "tools/benchmarks/gpu_check.sh", *argv])
    if args.work:
        return check(args, command, args.work.resolve())
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        return check(args, command, Path(folder))


if __name__ == "__main__":
    run_command_line(functools.partial(main, sys.argv[1:]), printed=False)
