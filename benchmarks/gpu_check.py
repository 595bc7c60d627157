#!/usr/bin/env python3
"""Check on GPUs what the tests can only check on a CPU, and measure memory and speed.

    bash benchmarks/gpu_check.sh                          # all parts
    bash benchmarks/gpu_check.sh 1 3                      # some of them
    bash benchmarks/gpu_check.sh 1 --strategies dp,fsdp   # fewer strategies

Parts, each of which ends within --part_seconds (570): what it had no time for is a FAIL.

    1  each strategy end to end; its checkpoint is resumed under the next strategy
    2  bf16 and fp16 under each strategy, and FSDP with CPU offload
    3  --check, SIGTERM and --resume, --deterministic, out of memory, calls that wait for the GPU
    4  memory: predicted and measured on 8 simulated GPUs, and of gpt2-medium on 4
    5  speed: gpt2 at 1,024 tokens, eager and compiled, next to transformers.Trainer
    6  all GPUs (without a GPU two CPU processes), with torchrun and, inside a Slurm job, with srun
    7  features: --compile, LoRA and 4 bit, packing, accumulation, --prove, --auto_micro_batch, the
       export loaded again

Each check is a line, PASS, FAIL or SKIP with a reason. The lines and the tables also go, after
every check, to <out>/report.md, or <out>/report-1-3.md of parts 1 and 3. Please report them in an
issue of this repository. No network is needed. Without a GPU the checks that a CPU can do run, on
the embedded model, and the others are skipped. Exit code: 1 if a line is FAIL.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.bench import (
    GB,
    PROJECT,
    RUN_SECONDS,
    SCRIPT,
    TORCHRUN,
    Bench,
    Done,
    describe_machine,
    losses_unlike,
    summary_of,
)
from support.memory.architectures import find_architecture
from support.memory.estimate import predict
from support.memory.workload import Workload
from support.tables import STRATEGIES

# Calls of a step for which the host may wait for the GPU. Those of DeepSpeed are upper bounds.
SYNCHRONIZING_CALLS = {"dp": 1, "fsdp": 1, "zero2": 8, "zero3": 8}
ADAPTER_TOLERANCE = 0.1  # of losses with adapters, and of those with 4-bit weights
LOW_PRECISION_TOLERANCE = 0.01  # relative difference of 16-bit losses from fp32 losses
# Relative error of the memory estimate's peak; 0.1 for the other strategies.
PEAK_TOLERANCE = {"zero3": 0.15, "infinity": 0.15}
SMALL = "--seq_length 64 --dropout 0 --logging_steps 1"  # for the embedded model
NO_FILES = "--no_eval --no_export --no_save"
ADVICE = re.compile(r"(--batch_size \d+ --gradient_accumulation_steps \d+): ([\d.]+)")
GPT2_BLOCKS = "4 blocks of 1,024 tokens"


# ------------------------------------------------------------------------------------ 1: strategies


def check_strategies(bench: Bench) -> None:
    """Train under each strategy, and resume its checkpoint of step 4 under the next strategy.

    All losses must equal those of the first strategy, which is dp unless --strategies leaves it
    out.
    """
    work = f"{SMALL} --batch_size 4 --precision fp32 --max_steps 8"
    more = "--save_every 4 --eval_samples 8 --generate The"
    strategies, runs = bench.runnable_strategies("strategy"), {}
    for strategy in strategies:
        run = bench.train(f"strategy-{strategy}", f"{work} {more} --strategy {strategy}")
        runs[strategy] = run
        expected = runs[strategies[0]].losses
        problem = run.problem() or losses_unlike(run.losses, expected, bench.tolerance)
        if not problem and not list((run.folder / "hf").glob("*.safetensors")):
            problem = "no exported model"
        bench.report(f"strategy {strategy}", problem, summary_of(run, expected))
    for saver, other in zip(strategies, strategies[1:] + strategies[:1], strict=True):
        name, saved = f"resume {saver} under {other}", step_4_of(runs[saver])
        if not saved.exists():
            bench.report(name, "no checkpoint")
            continue
        flags = f"{work} --no_eval --no_export --strategy {other} --resume"
        expected = after_step_4(runs[strategies[0]].losses)
        bench.compare(name, f"resume-{saver}-{other}", expected, flags, saved)


def step_4_of(run: Done) -> Path:
    """Return the path where the checkpoint of step 4 should be."""
    return run.folder / "checkpoints" / "step-00000004"


def after_step_4(losses: dict[int, float]) -> dict[int, float]:
    """Return the losses that a run resumed from step 4 should have."""
    return {step: loss for step, loss in losses.items() if step > 4}


# ------------------------------------------------------------------------------------ 2: precisions


def check_precisions(bench: Bench) -> None:
    """Check that 16-bit losses are within 1% of fp32: each strategy, and FSDP with CPU offload."""
    work = f"{SMALL} {NO_FILES} --batch_size 4 --max_steps 8"
    reference = bench.train("fp32-dp", f"{work} --precision fp32")
    if not bench.report("fp32 dp", reference.problem(), summary_of(reference, {})):
        return
    offload = bench.out / "fsdp_offload.json"
    offload.write_text('{"fsdp_offload_params": true}')
    for precision in ("bf16", "fp16"):
        if precision == "fp16" and not bench.needs_gpu("fp16"):
            continue
        runs = [(s, [f"--strategy {s}"]) for s in bench.runnable_strategies(precision)]
        if "fsdp" in bench.strategies:
            runs.append(("fsdp with CPU offload", ["--strategy fsdp --fsdp_config", offload]))
        for name, flags in runs:
            folder, flags = f"{precision}-{name}".replace(" ", "-"), [*flags, work]
            flags.append(f"--precision {precision}")
            bench.compare(
                f"{precision} {name}",
                folder,
                reference.losses,
                *flags,
                tolerance=LOW_PRECISION_TOLERANCE,
            )


# ------------------------------------------------------------------------------------- 3: behavior


def check_behaviour(bench: Bench) -> None:
    """Check --check, and how a run ends and resumes."""
    for strategy in bench.runnable_strategies("--check"):
        if strategy in ("dp", "offload", "infinity"):
            bench.succeeds(f"--check {strategy}", SCRIPT, "--check", "--strategy", strategy)
    check_signal(bench)
    check_determinism(bench)
    check_out_of_memory(bench)
    check_synchronizing_calls(bench)


def check_signal(bench: Bench) -> None:
    """Check that SIGTERM saves and exits with 75, and that --resume then makes three more steps.

    The resumed run must neither repeat nor skip a step.
    """

    def stop(process, folder: Path) -> None:
        log, give_up = folder / "metrics.jsonl", time.monotonic() + RUN_SECONDS / 2
        while process.poll() is None and time.monotonic() < min(give_up, bench.ends_at):
            if log.exists() and log.read_text().count("\n") >= 3:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)

    work = f"{SMALL} --batch_size 4 --lr_scheduler constant --no_eval --no_export"
    run = bench.train("sigterm", f"{work} --max_steps 1000000", meanwhile=stop)
    last = max(run.losses, default=0)
    if not bench.report("SIGTERM", run.problem(75, "preempted"), f"stopped after step {last}"):
        return
    again = bench.train("sigterm", f"{work} --max_steps {last + 3} --resume", keep=True)
    problem, steps = again.problem(), [record["step"] for record in again.records()]
    if not problem and steps != list(range(1, last + 4)):
        problem = f"{len(steps)} steps are logged instead of 1 to {last + 3}"
    bench.report("--resume after SIGTERM", problem, f"resumed, up to step {last + 3}")


def check_determinism(bench: Bench) -> None:
    """Check that two --deterministic runs, and one resumed at half, have exactly equal losses."""
    gpt2 = "--model gpt2 --from_scratch --dataset pydocs --seq_length 256"
    work = f"{gpt2 if bench.on_gpu else '--seq_length 64'} --batch_size 4 --logging_steps 1"
    work += " --no_eval --no_export --deterministic --dropout 0.1 --max_steps 8"
    first = bench.train("deterministic-1", f"{work} --save_every 4")
    name, flags = "deterministic-2", f"{work} --no_save"
    bench.compare("--deterministic twice", name, first.losses, flags, tolerance=0)
    name, flags = "deterministic-resumed", [f"{work} --resume", step_4_of(first)]
    expected = after_step_4(first.losses)
    bench.compare("--deterministic --resume", name, expected, *flags, tolerance=0)


def check_out_of_memory(bench: Bench) -> None:
    """Check that a too large batch exits with 3 and advice, and that the advised batch trains."""
    if not bench.needs_gpu("out of memory"):
        return
    work, batch = [*gpt2_at_1024(bench), f"{NO_FILES} --max_steps 3"], too_large_batch(bench)
    run = bench.train("oom", *work, f"--batch_size {batch}")
    advice = ADVICE.search(run.log)
    problem = run.problem(3, "oom") or ("" if advice else "no smaller batch is advised")
    if not bench.report("out of memory", problem, f"batch {batch}, exit code 3, with advice"):
        return
    followed = bench.train("oom-advice", *work, advice[1])
    peak = max((followed.results.get("memory") or {}).get("peak_bytes") or [0]) / GB
    text = f"{advice[1]}: planned {advice[2]} GB with reserves, peak {peak:.1f} GB"
    bench.report("following the advice", followed.problem(), text)


def too_large_batch(bench: Bench) -> int:
    """Return a batch size for which the activations alone exceed the memory of a GPU.

    It is the smallest power of two, for GPT-2 and sequences of 1,024 tokens.
    """
    model, batch = find_architecture("gpt2"), 1
    memory = bench.machine.gpu_memory
    while predict(Workload(model, 1, batch, 1024), "dp").activations <= memory:
        batch *= 2
    return batch


def gpt2_at_1024(bench: Bench, model: str = "gpt2") -> list:
    """Return flags: random weights, and sequences of 1,024 tokens of Python's standard library."""
    corpus = bench.out / "corpus.txt"
    if not corpus.exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        corpus.write_text(text, encoding="utf-8")
    return [f"--model {model} --from_scratch --seq_length 1024 --dropout 0 --dataset", corpus]


def check_synchronizing_calls(bench: Bench) -> None:
    """List the calls in a step for which the host waits for the GPU."""
    if not bench.needs_gpu("synchronizing calls"):
        return
    table = ["| strategy | calls a step | call | from |", "|---|---|---|---|"]
    bench.tables["Calls that wait for the GPU"] = table
    for strategy in [s for s in bench.strategies if s in SYNCHRONIZING_CALLS]:
        file = bench.out / f"sync-{strategy}.json"
        file.unlink(missing_ok=True)
        watch = [sys.executable, PROJECT / "benchmarks" / "synchronizing_calls.py", file]
        flags = [*gpt2_at_1024(bench), f"{NO_FILES} --strategy {strategy} --max_steps 20"]
        run = bench.train(f"sync-{strategy}", *flags, program=watch)
        problem = run.problem() or ("" if file.exists() else "nothing was recorded")
        record = json.loads(file.read_text()) if file.exists() else {"steps": 1, "calls": []}
        for call in record["calls"]:
            number = f"{call['count'] / record['steps']:g}"
            table.append(f"| {strategy} | {number} | {call['call']} | {call['project']} |")
        calls_per_step = sum(call["count"] for call in record["calls"]) / record["steps"]
        text = f"{calls_per_step:g} a step (limit {SYNCHRONIZING_CALLS[strategy]}), listed below"
        too_many = text if calls_per_step > SYNCHRONIZING_CALLS[strategy] else ""
        bench.report(f"synchronizing calls {strategy}", problem or too_many, text)


# ---------------------------------------------------------------------------------------- 4: memory


def check_memory(bench: Bench) -> None:
    """Compare the peaks of a simulated rank with the memory estimate."""
    name = "gpt2-medium on 4 simulated GPUs"
    # On a CPU, offloaded states cannot be told from the rest of host memory.
    if not bench.on_gpu:
        for strategy in [s for s in bench.strategies if not STRATEGIES[s].offloads]:
            simulate(bench, [SMALL], strategy, 8, "tiny-gpt2, 4 blocks of 64 tokens")
        bench.skip(name, "needs a GPU")
        return
    for strategy in bench.runnable_strategies("8 simulated GPUs"):
        simulate(bench, gpt2_at_1024(bench), strategy, 8, f"gpt2, {GPT2_BLOCKS}")
    sharded_more = [s for s in ("dp", "zero2", "zero3") if s in bench.strategies]
    flags, title = gpt2_at_1024(bench, "gpt2-medium"), f"gpt2-medium, {GPT2_BLOCKS}"
    peaks = [simulate(bench, flags, strategy, 4, title) for strategy in sharded_more]
    falling = all(peaks) and peaks == sorted(peaks, reverse=True)
    text = ", ".join(f"{s} {p:.2f}" for s, p in zip(sharded_more, peaks, strict=True)) + " GB"
    bench.report(f"{name} needs less the more is sharded", "" if falling else text, text)


MEMORY_HEAD = (
    "| strategy | step's peak, predicted | measured | off | reserved | outside the allocator "
    "| host, predicted | process in host memory |",
    "|---|---|---|---|---|---|---|---|",
)


def simulate(bench: Bench, work: list, strategy: str, ranks: int, title: str) -> float:
    """Compare the peak memory of a step of simulated rank 0 with the memory estimate.

    Args:
        work: flags of the model and the data.
        ranks: number of simulated GPUs.
        title: the model, a comma, and the batch; names the table.
    Returns:
        The measured peak in GB; 0 if the run failed.
    """
    model = title.split(",")[0]
    flags = f"--batch_size 4 --precision bf16 --strategy {strategy} --simulate_gpus {ranks}"
    run = bench.train(f"simulated-{ranks}-{model}-{strategy}", *work, flags)
    name, problem = f"{strategy}, {model}, {ranks} simulated GPUs", run.problem()
    if problem:
        bench.report(name, problem)
        return 0
    memory = run.results["memory"]
    predicted = memory["predicted_bytes"]["peak"] / GB
    peak = max(phase["peak"] for phase in memory["step_bytes_by_rank"][0].values()) / GB
    error, tolerance = predicted / peak - 1, PEAK_TOLERANCE.get(strategy, 0.1)
    unseen = (memory["device_used"][0] or {}).get("unseen")
    host = memory["predicted_bytes"]["host"], memory["host_peak_bytes"][0]
    around = (memory["reserved_bytes"][0], unseen, *host)  # what the estimate only allows for
    cells = [strategy, f"{predicted:.3f}", f"{peak:.3f}", f"{error:+.1%}"]
    cells += [f"{size / GB:.3f}" if size else "—" for size in around]
    heading = f"Memory in GB on 1 of {ranks} simulated GPUs: {title}, bf16"
    bench.tables.setdefault(heading, list(MEMORY_HEAD)).append(f"| {' | '.join(cells)} |")
    text = (
        f"predicted {predicted:.3f} GB, measured {peak:.3f}, {error:+.1%} (limit {tolerance:.0%})"
    )
    bench.report(name, text if abs(error) > tolerance else "", text)
    return peak


# ----------------------------------------------------------------------------------------- 5: speed


def check_speed(bench: Bench) -> None:
    """Measure this project next to transformers.Trainer, and where a step spends its time."""
    if not bench.needs_gpu("speed"):
        return
    model = find_architecture("gpt2")
    for name in ("eager-4", "compiled-4", "eager", "compiled"):
        case = peers.GPU_CASES[name]
        work = Workload(model, 1, case.setting.batch_size, case.setting.seq_length)
        needed_bytes = predict(work, "dp").total
        if needed_bytes > bench.machine.gpu_memory:
            planned = f"planned {needed_bytes / GB:.0f} GB, more than there is"
            bench.skip(f"speed, {case.title}", planned)
            continue
        out = bench.out / "peers" / name
        shutil.rmtree(out, ignore_errors=True)
        flags = f"--gpu --cases {name} --only ours,Trainer --rounds 3 --steps 100 --out".split()
        program = [sys.executable, "-m", "benchmarks.peers", *flags, out]
        run = bench.run(f"speed-{name}", program)
        table = [line for line in run.log.splitlines() if line.startswith("|")]
        if table:
            bench.tables[case.title] = table
        problem = "" if run.code == 0 and table else f"no result: {run.reason()}"
        bench.report(f"speed, {case.title}", problem, f"{run.seconds:.0f} s")
    profile_step(bench)


def profile_step(bench: Bench) -> None:
    """Show the parts of a profiled step of dp: head, attention, elementwise kernels, idle time."""
    folder = bench.out / "runs" / "profile-trace"
    flags = f"{NO_FILES} --batch_size 4 --precision bf16 --max_steps 8 --profile"
    run = bench.train("profile", *gpt2_at_1024(bench), flags, folder)
    trace, problem = folder / "trace-rank0.json", run.problem()
    if problem or not trace.exists():
        bench.report("profile of a step", problem or "no trace was written")
        return
    shares = kernel_shares(json.loads(trace.read_text())["traceEvents"])
    bench.tables["Parts of the time of a step, gpt2, 4 sequences of 1,024 tokens, bf16, eager"] = [
        "| part | share |",
        "|---|---|",
        *(f"| {part} | {share:.1%} |" for part, share in shares.items()),
    ]
    bench.report("profile of a step", "" if shares else "the trace has no kernels", "listed below")


# Parts of a step, and what the names of their kernels contain; the first match counts.
KERNELS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "flex"),
    "matrix products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "sm80_", "sm90_"),
    "elementwise": ("elementwise", "vectorized", "multi_tensor", "reduce", "norm", "triton"),
    "communication": ("nccl",),
}


def kernel_shares(events: list[dict]) -> dict[str, float]:
    """Return the shares of the parts of a step in its time on the GPU; {} without kernels.

    Args:
        events: of a trace of PyTorch's profiler. Kernels of the head are those inside the
            annotation "head" of support/model/loss.py.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    heads = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] == "head"
    ]
    if not kernels:
        return {}
    seconds = dict.fromkeys(["head", *KERNELS, "other"], 0.0)
    for kernel in kernels:
        name = kernel["name"].lower()
        in_head = any(start <= kernel["ts"] < end for start, end in heads)
        part = next((p for p, words in KERNELS.items() if any(w in name for w in words)), "other")
        seconds["head" if in_head else part] += kernel["dur"]
    busy, end = 0.0, 0.0  # kernels of several streams may overlap
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        finish = kernel["ts"] + kernel["dur"]
        busy += max(0.0, finish - max(end, kernel["ts"]))
        end = max(end, finish)
    total = end - min(kernel["ts"] for kernel in kernels)
    return {part: value / total for part, value in seconds.items()} | {"idle": 1 - busy / total}


# --------------------------------------------------------------------------------- 6: several ranks


def check_all_gpus(bench: Bench) -> None:
    """Check that several ranks have the losses of one rank with the same global batch."""
    ranks = bench.machine.gpus or 2
    if ranks == 1:
        bench.skip("several GPUs", "needs more than one GPU")
        return
    work = f"{SMALL} {NO_FILES} --precision fp32 --max_steps 8"
    single = bench.train("one-rank", f"{work} --batch_size {2 * ranks}")
    if not bench.report(f"one rank, batch {2 * ranks}", single.problem(), summary_of(single, {})):
        return
    launchers = {"torchrun": [*TORCHRUN, f"--nproc_per_node={ranks}", SCRIPT]}
    if "SLURM_JOB_ID" in os.environ:
        srun = ["srun", f"--ntasks={ranks}", "--kill-on-bad-exit=1", sys.executable, SCRIPT]
        launchers["srun"] = srun
    else:
        bench.skip("srun", "not inside a Slurm job")
    for launcher, program in launchers.items():
        for strategy in bench.runnable_strategies(launcher):
            flags = f"{work} --batch_size 2 --strategy {strategy}"
            run = bench.train(f"{launcher}-{strategy}", flags, program=program)
            problem = run.problem() or losses_unlike(run.losses, single.losses, bench.tolerance)
            if not problem and run.results["world_size"] != ranks:
                problem = f"{run.results['world_size']} ranks instead of {ranks}"
            name = f"{launcher}, {ranks} ranks, {strategy}"
            bench.report(name, problem, summary_of(run, single.losses))


# -------------------------------------------------------------------------------------- 7: features


def check_features(bench: Bench) -> None:
    """Check features that train with dp's losses, and some that end in a way of their own."""
    all_work = f"{SMALL} --precision fp32 --max_steps 8 --batch_size"
    dp = bench.train("features-dp", f"{all_work} 4 --eval_samples 8")
    if not bench.report("features: dp", dp.problem(), summary_of(dp, {})):
        return
    flags = f"{all_work} 2 {NO_FILES} --gradient_accumulation_steps 2"
    bench.compare("accumulation", "accumulation", dp.losses, flags)
    check_packing(bench, f"{all_work} 2 {NO_FILES} --packing --dataset")
    flags = f"{all_work} 4 --eval_samples 8 --eval_only --dataset pydocs --model"
    again = bench.train("export-reloaded", flags, dp.folder / "hf")
    losses = [{1: results.get("eval_loss")} for results in (again.results, dp.results)]
    problem = again.problem() or losses_unlike(*losses, bench.tolerance)
    bench.report("the export loaded again", problem, f"{again.seconds:.0f} s")
    check_adapters(bench, dp, f"{all_work} 4 --no_eval --lr 1e-3 --lora_r 8")
    for strategy in [s for s in ("zero2", "fsdp") if s in bench.strategies]:
        flags = f"{all_work} 4 {NO_FILES} --compile --strategy {strategy}"
        bench.compare(f"--compile {strategy}", f"compile-{strategy}", dp.losses, flags)
    if bench.needs_gpu("--auto_micro_batch"):
        flags = f"{NO_FILES} --max_steps 3 --auto_micro_batch --batch_size {too_large_batch(bench)}"
        run = bench.train("auto-micro-batch", *gpt2_at_1024(bench), flags)
        size = run.results.get("batch_size")
        bench.report("--auto_micro_batch", run.problem(), f"batch_size {size}, {run.seconds:.0f} s")
    if bench.machine.gpus == 1:
        bench.skip("--prove", "needs more than one GPU")
    else:
        bench.succeeds("--prove", SCRIPT, "--prove", str(max(2, bench.machine.gpus)))


def check_packing(bench: Bench, flags: str) -> None:
    """Check that packed examples have the losses of the CPU, which masks attention densely."""
    rows = bench.out / "rows.jsonl"
    examples = [
        {"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(400)
    ]
    rows.write_text("".join(json.dumps(example) + "\n" for example in examples))
    on_cpu = bench.train("packing-cpu", flags, rows, env={"CUDA_VISIBLE_DEVICES": ""})
    bench.compare("packing with isolation", "packing", on_cpu.losses, flags, rows)


def check_adapters(bench: Bench, dp: Done, flags: str) -> None:
    """Check that LoRA trains, and that 4-bit weights have similar losses."""
    lora = bench.train("lora", flags)
    problem = lora.problem() or losses_unlike(lora.losses, dp.losses, ADAPTER_TOLERANCE)
    if not problem and not (lora.folder / "hf" / "adapter_model.safetensors").exists():
        problem = "no exported adapters"
    bench.report("LoRA", problem, summary_of(lora, dp.losses))
    if importlib.util.find_spec("bitsandbytes") is None:
        bench.skip("LoRA, 4 bit", "needs bitsandbytes")
        return
    flags, folder = f"{flags} --load_in_4bit", "lora-4bit"
    bench.compare("LoRA, 4 bit", folder, lora.losses, flags, tolerance=ADAPTER_TOLERANCE)


# -------------------------------------------------------------------------------------------- parts

PARTS = {
    1: check_strategies,
    2: check_precisions,
    3: check_behaviour,
    4: check_memory,
    5: check_speed,
    6: check_all_gpus,
    7: check_features,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; `strategies` becomes a list."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gpu_check.sh", description=__doc__, formatter_class=raw)
    add, out = parser.add_argument, PROJECT / "runs" / "gpu_check"
    add("parts", nargs="*", type=int, metavar="PART", help="1 to 7 (default: all)")
    add("--strategies", default=",".join(STRATEGIES), help="(default: %(default)s)")
    add("--out", type=Path, default=out, help="of logs and report (default: runs/gpu_check)")
    add("--part_seconds", type=int, default=570, help="(default: %(default)s)")
    args = parser.parse_args(argv)
    args.strategies = args.strategies.split(",")
    unknown = [s for s in args.strategies if s not in STRATEGIES]
    unknown += [str(part) for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return args


def main(argv: list[str]) -> int:
    """Run the requested parts and return the exit code."""
    args = parse(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    report = out / f"report{''.join(f'-{part}' for part in args.parts)}.md"
    command = shlex.join(["bash", "benchmarks/gpu_check.sh", *argv])
    bench = Bench(describe_machine(), out, report, args.strategies, command)
    print("; ".join(bench.machine.facts), flush=True)
    for part in args.parts or PARTS:
        bench.ends_at = time.monotonic() + args.part_seconds
        PARTS[part](bench)
    verdicts = [verdict for verdict, _, _ in bench.lines]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("PASS", "FAIL", "SKIP")]
    print(f"{', '.join(counts)}; {report}", flush=True)
    return 1 if "FAIL" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
