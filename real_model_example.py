#!/usr/bin/env python3
"""Fine-tune a real causal language model, with one flag choosing how the work is spread over
processes.

    python real_model_example.py                                        # embedded model and text, no network
    python real_model_example.py --model gpt2 --num_samples 100         # one GPU (or the CPU)
    torchrun --nproc_per_node=4 real_model_example.py --strategy zero2  # four GPUs (or four CPU processes)
    deepspeed --num_gpus=4 real_model_example.py --strategy zero3
    accelerate launch --multi_gpu --num_processes 4 real_model_example.py --strategy fsdp
    srun --ntasks=8 --kill-on-bad-exit=1 python real_model_example.py --strategy zero3    # inside a Slurm job

Strategies, by what each of N ranks keeps of parameters (P), gradients (G) and optimizer states (O):

    dp        all of P, G, O         PyTorch's DistributedDataParallel
    zero1     P, G,   O/N            DeepSpeed
    zero2     P, G/N, O/N            DeepSpeed
    zero3     P/N, G/N, O/N          DeepSpeed
    offload   zero2, with O in host memory, updated by the CPU
    infinity  zero3, with O and P on NVMe
    fsdp      P/N, G/N, O/N          PyTorch's FSDP2

Every strategy computes the same thing: for the same global batch the losses agree, whatever the
number of ranks. Read main() first, then train_epoch_ddp() beside train_epoch_deepspeed(): what
differs is what the strategy changes. Results are in <output_dir>/results.json and metrics.jsonl.
"""

from __future__ import annotations

import sys

from support import process

if __name__ == "__main__":  # before the imports, which take seconds
    process.protect_output()
    process.catch_signals(process.ALSO_IF_IGNORED)

from support.cli import validate as preflight

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: --help and wrong arguments answer at once, and
    # the settings that libraries read while they are imported (threads, allocator, offline mode)
    # are in place.
    ARGS, LAUNCH = preflight.start(sys.argv[1:])

import contextlib
import itertools
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from support.checkpoints import manager as checkpoint
from support.cli.flags import EMBEDDED_MODEL, NEED_EVALUATIONS
from support.cluster.context import (
    ARRIVAL_SECONDS,
    Run,
    group_options,
    identify_gpu,
    meet,
    open_store,
    simulate_process_group,
)
from support.cluster.launch import exit_before_start, keep_freed_memory
from support.commands import check as checks
from support.commands.prefetch import prefetch
from support.data import batches as data
from support.data import streaming
from support.data import tokenize as tokens
from support.errors import EXIT_COMPLETED, EXIT_PREEMPTED, Preempted, UserError
from support.memory import measure as memory
from support.model import export
from support.model import generate as sampling
from support.model import resolve as models
from support.model.loss import loss_in_place_of_logits
from support.report import metrics_log as metering
from support.report import profiling as tracing
from support.report import results as reporting
from support.strategies import gradients
from support.strategies.deepspeed import OneByOne, configure_deepspeed, quiet

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one block, or a stream without --validation_file"
)
# batches of an evaluation between two looks whether a signal came: each look waits for all ranks
STOP_CHECK_BATCHES = 8


# ================================================================================ the process group


def setup_distributed(args, launch) -> Run:
    """Join the other ranks: NCCL between GPUs, gloo between CPU processes.

    Every strategy and a single process, too, has a process group, so that there is one code path to
    read.
    """
    if torch.cuda.is_available():
        device = torch.device(
            "cuda", preflight.check_visible_gpus(launch, torch.cuda.device_count())
        )
        torch.cuda.set_device(device)
        backend = "nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    limit = timedelta(seconds=args.ddp_timeout)
    if args.simulate_gpus:
        run = Run(launch, device, "fake", args.verbose, args.quiet)
        simulate_process_group(launch.world_size, limit)
    else:
        patience = min(args.ddp_timeout, ARRIVAL_SECONDS)
        store, attempt = meet(launch, backend, patience, identify_gpu(device))
        run = Run(launch, device, backend, args.verbose, args.quiet, attempt)
        if (
            launch.world_size > 1
        ):  # before NCCL connects the ranks, which may wait for one that has ended
            run.store = open_store(launch, attempt)
            run.watch_for_failures()
        options = group_options(args, device, launch.world_size)
        dist.init_process_group(
            store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit, **options
        )
        run.nodes = sum(run.gather(launch.is_node_leader))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the number of the GPU

    torch.set_float32_matmul_precision("high")  # TF32 tensor cores for fp32 on GPUs that have them
    if args.deterministic:
        # Not warn_only: then attention's backward pass on a GPU would not be deterministic.
        torch.use_deterministic_algorithms(True)
    return run


# =================================================================================== model and data


def find_model(args, run: Run) -> models.Blueprint:
    """Find the model, its sizes and its tokenizer, without loading any weights."""
    if not args.hub_offline:
        run.say(f"⏳ Downloading {args.model}, where it is not in the cache")
    blueprint = models.find_model(args, run)
    limit = models.max_positions(blueprint.config)
    if args.seq_length is None:
        args.seq_length = min(256 if args.model == EMBEDDED_MODEL else 512, limit or 512)
    if limit and args.seq_length > limit:
        raise UserError(
            f"--seq_length {args.seq_length} is more than the {limit} positions of {args.model}."
        )
    doing = (
        "Simulating the memory of"
        if run.simulated
        else "Evaluating"
        if args.eval_only
        else "Fine-tuning"
    )
    base = blueprint.parameters - (blueprint.trainable if blueprint.lora else 0)
    run.say(f"🚀 {doing} {args.model} ({reporting.human_count(base)} parameters)")
    run.say(f"📋 Strategy: {args.strategy.upper()}")
    if blueprint.own_settings:
        run.say(
            "🔧 gelu_new is computed as gelu_pytorch_tanh, the same function in one kernel (--no_fused_gelu keeps it)"
        )
    if not blueprint.chunked_loss:
        run.say(
            "🔧 All logits of a batch are computed at once: this model changes them, or has adapters on its output layer"
        )
    return blueprint


def load_model_and_tokenizer(args, run: Run, blueprint: models.Blueprint):
    """Bring the weights to where the strategy wants them.

    dp, zero1, zero2 and offload hold a whole copy per rank; zero3, infinity and fsdp split it while
    loading.
    """
    if args.generate:
        sampling.tokens_of(
            args.generate, blueprint.tokenizer
        )  # a prompt that cannot be used is refused now
    if args.ds_config_dict:
        configure_deepspeed(args, run, blueprint)
    if args.strategy == "fsdp":
        model = shard_with_fsdp(blueprint, run, args)
    elif args.strategy in ("zero3", "infinity"):
        model = shard_with_zero3(blueprint, run, args)
    else:
        model = blueprint.load(run)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dist.barrier()
    if not args.merge_lora:  # which will read them again
        run.clean_up(blueprint.weights)
    run.say(
        f"✅ Model loaded: {blueprint.parameters:,} parameters ({blueprint.parameters / 1e6:.1f}M)"
    )
    if blueprint.lora:
        share = blueprint.trainable / blueprint.parameters
        run.say(
            f"🔧 LoRA: {blueprint.trainable:,} of {blueprint.parameters:,} parameters are trained ({share:.2%})"
        )
        if blueprint.random and not (args.merge_lora or args.no_export):
            run.warn(
                "The frozen weights are random, and adapters are worth nothing without them: --merge_lora exports both."
            )
    return model, blueprint.tokenizer


def prepare_dataset(args, run: Run, tokenizer):
    """Read, tokenise and pack the corpus (once per node, and kept for later runs), or under
    --streaming only open it.

    Returns:
        Training blocks, validation blocks, and the facts for results.json.
    """
    if args.streaming:
        return streaming.open_stream(args, run, tokenizer)
    prepared = tokens.tokenize_corpus(
        args, run, tokenizer, args.dataset, args.dataset_config, args.validation_file
    )
    train, validation, facts = data.split_blocks(prepared, args)
    reporting.say_dataset(run, args, facts, tokenizer)
    bad_rows = prepared["bad_rows"]
    return (
        train,
        validation,
        {
            "name": args.dataset,
            **facts["train"],
            "bad_rows": bad_rows,
            "validation": facts["validation"],
        },
    )


# ========================================================================= one wrapper per strategy


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Decay for matrices and embeddings, none for biases and norms; the same for every strategy."""
    # A parameter partitioned by ZeRO-3 keeps its true shape in ds_shape.
    matrix = {
        p: len(getattr(p, "ds_shape", p.shape)) >= 2 for p in model.parameters() if p.requires_grad
    }
    groups = [
        {"params": [p for p in matrix if matrix[p]], "weight_decay": weight_decay},
        {"params": [p for p in matrix if not matrix[p]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # adapters are matrices only


def adamw(model: nn.Module, args) -> torch.optim.AdamW:
    """The optimizer of dp and fsdp; the ds_config files ask DeepSpeed for the same one."""
    return torch.optim.AdamW(
        parameter_groups(model, args.weight_decay),
        lr=args.lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )


def wrap_with_ddp(model: nn.Module, run: Run) -> nn.Module:
    """A whole model on every rank; gradients are averaged over the ranks while backward still runs."""
    model.to(run.device)
    if run.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[run.device.index] if run.device.type == "cuda" else None,
        # gradients live in the buckets that are communicated, not beside them
        gradient_as_bucket_view=True,
        # masks and rotary frequencies: the same on every rank, and never changed
        broadcast_buffers=False,
    )
    if run.simulated:  # DDP's own all-reduce insists on an answer of the other ranks
        wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def shard_with_fsdp(blueprint: models.Blueprint, run: Run, args) -> nn.Module:
    """Split parameters, gradients and optimizer states over the ranks, one transformer block at a
    time.

    The sharded model is built without memory (meta device); then rank 0's weights are broadcast
    tensor by tensor and each rank keeps its part.
    """
    whole = blueprint.load(run) if run.is_main else None
    sharded = blueprint.on_meta_device()
    # Compute in 16 bit, keep the shards and reduce the gradients in fp32. fp16 computes under
    # autocast, see autocast().
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if run.precision == "bf16" else None, reduce_dtype=torch.float32
    )
    options = args.fsdp
    offload = (
        CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
        if options.offload
        else OffloadPolicy()
    )
    how = {"mesh": run.mesh(options.hybrid), "mp_policy": policy, "offload_policy": offload}
    blocks = models.blocks_to_shard(sharded, options, run)
    for block in blocks:
        if args.compile:
            block.compile()
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **how)
    fully_shard(sharded, **how)
    if options.forward_prefetch:
        for block, following in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    sharded.to_empty(device="cpu" if options.offload else run.device)
    models.fill_from_rank0(sharded, whole, run)
    return sharded


def shard_with_zero3(blueprint: models.Blueprint, run: Run, args) -> nn.Module:
    """Split every parameter over the ranks as it is read (infinity: and write this rank's part to
    NVMe).

    Loading only maps the weights file. A parameter is in memory from its copy here until DeepSpeed
    has taken this rank's part of it, so that no rank ever holds more than its own part and one
    whole parameter.
    """
    import deepspeed

    model = blueprint.load(
        run, dtype="auto"
    )  # in the file's own type: converting here would copy the whole model
    with quiet(args.verbose):
        deepspeed.zero.Init(
            module=OneByOne(model, models.DTYPES[run.precision]),
            config_dict_or_path=args.ds_config_dict,
        )
    for buffer in model.buffers():  # they are not split, and DeepSpeed leaves them where they are
        buffer.data = buffer.data.to(run.device)
    return model


def initialize_deepspeed(model: nn.Module, args, run: Run):
    """Hand model and optimizer to DeepSpeed, configured by the JSON file."""
    import deepspeed

    groups = None if args.eval_only else parameter_groups(model, args.weight_decay)
    config = dict(args.ds_config_dict)
    if args.eval_only:
        config.pop("optimizer")
    with quiet(args.verbose):
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    if args.compile:
        engine.compile()
    return engine


# ========================================================================================= training


def learning_rate(step: int, total_steps: int, args) -> float:
    """Linear warm-up to --lr, then --lr_scheduler down towards 0 at `total_steps`; `step` counts
    from 0.
    """
    if step < args.warmup_steps:
        return args.lr * (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    falling = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return args.lr * falling[args.lr_scheduler]


def set_learning_rate(optimizer, lr: float) -> None:
    """Torch's optimizers and DeepSpeed's wrappers both read it from their parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def next_token_loss(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Forward pass, and the cross entropy of each next token: summed, and divided by `tokens`.

    Args:
        inputs: token ids [batch, length].
        labels: [batch, length]; data.IGNORED where a token does not count.
        tokens: of the whole step, on all ranks, so that their sums add up to the mean; a scalar
            tensor.
    Returns:
        A scalar in fp32.
    """
    # Shifting the labels instead of the logits saves a copy of the largest tensor of the whole
    # step.
    targets = F.pad(labels[:, 1:], (0, 1), value=data.IGNORED)
    with loss_in_place_of_logits(model, targets, tokens) as chunked:
        output = model(input_ids=inputs, use_cache=False).logits
    if chunked:  # the output layer has computed the loss, and never all logits at once
        return output
    logits = output.flatten(0, 1).float()
    return (
        F.cross_entropy(logits, targets.flatten(), ignore_index=data.IGNORED, reduction="sum")
        / tokens
    )


def count_tokens(window: data.Window, run: Run) -> torch.Tensor:
    """Of one optimizer step, over all micro-batches of all ranks: [tokens that its loss is the mean
    over, all tokens that are read, ranks that were asked to stop]; on the device, from one
    all-reduce.
    """
    counts = torch.zeros(3, device=run.device)
    counts[0] = sum((labels[:, 1:] != data.IGNORED).sum() for _, labels in window.batches)
    counts[1].fill_(window.tokens)
    counts[2].fill_(bool(run.stop.requested))
    dist.all_reduce(counts)
    return counts


def autocast(model: nn.Module, run: Run):
    """16-bit arithmetic for weights that are kept in fp32.

    DeepSpeed's engine has converted the weights, and FSDP2 converts them to bf16 as it gathers them
    (its policy).
    """
    by_fsdp = isinstance(model, FSDPModule) and run.precision == "bf16"
    converted = by_fsdp or hasattr(model, "set_gradient_accumulation_boundary")
    return torch.autocast(
        run.device.type,
        models.DTYPES[run.precision],
        enabled=run.precision != "fp32" and not converted,
    )


@contextlib.contextmanager
def gradient_sync(model: nn.Module, needed: bool):
    """Communicate gradients in this backward pass only if `needed`: on the last micro-batch of a
    step.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(needed)
    without = isinstance(model, DistributedDataParallel) and not needed
    with model.no_sync() if without else contextlib.nullcontext():
        yield


def windows_of_epoch(train, epoch: int, done: int, args, run: Run):
    """This rank's micro-batches (inputs, labels) of each optimizer step of one epoch, on the
    device; see data.windows.

    The first `done` blocks are left out: they were trained on before a resume, or before an
    evaluation.
    """
    if args.streaming:
        return train.windows(run.device)
    order = data.epoch_order(train.blocks, args.seed, epoch)[done:]
    windows = data.windows(
        train, order, args.batch_size, args.gradient_accumulation_steps, run.rank, run.world_size
    )
    return data.prefetch(windows, run.device)


def train_epoch_ddp(model, optimizer, scaler, train, epoch, meter, saver, args, run):
    """One epoch of plain PyTorch, for dp and fsdp."""
    model.train()
    held_back = torch.zeros((), dtype=torch.bool, device=run.device)

    meter.start_epoch(epoch)
    for window in windows_of_epoch(train, epoch, meter.position, args, run):
        lr = learning_rate(meter.step, meter.total_steps, args)
        set_learning_rate(optimizer, lr)
        learned, read, stop = count_tokens(window, run)
        loss_of_step = torch.zeros((), device=run.device)
        meter.mark("data")

        for micro_step, (inputs, labels) in enumerate(window.batches):
            data.seed_dropout(args.seed, meter.step, micro_step, run.rank)
            with gradient_sync(model, needed=micro_step + 1 == len(window.batches)):
                with autocast(model, run):
                    loss = next_token_loss(model, inputs, labels, learned)
                meter.mark("forward")
                # DDP and FSDP divide the sum over the ranks by their number; `learned` already
                # counts all ranks.
                scaler.scale(loss * run.world_size).backward()
                meter.mark("backward")
            loss_of_step += loss.detach()

        dist.all_reduce(loss_of_step)  # the parts of all ranks add up to the mean over all tokens
        meter.after_backward()
        scaler.unscale_(optimizer)
        grad_norm = gradients.norm(model)
        if args.max_grad_norm:
            nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, grad_norm)
        gradients.hold_back_if_not_finite(
            optimizer, loss_of_step, held_back, run, scaler, grad_norm
        )
        scaler.step(optimizer)  # without loss scaling (fp32, bf16) just optimizer.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.mark("update")

        meter.end_step(loss_of_step, lr, grad_norm, read)
        saver.after_step(meter, stop)
        if meter.evaluation_is_due or meter.finished:
            break


def train_epoch_deepspeed(engine, train, epoch, meter, saver, args, run):
    """One epoch under DeepSpeed: the engine clips, scales the loss (fp16), updates and clears the
    gradients.
    """
    engine.train()
    held_back = torch.zeros((), dtype=torch.bool, device=run.device)

    meter.start_epoch(epoch)
    for window in windows_of_epoch(train, epoch, meter.position, args, run):
        if engine.lr_scheduler is None:  # a user's DeepSpeed file may bring its own
            set_learning_rate(engine.optimizer, learning_rate(meter.step, meter.total_steps, args))
        lr = engine.optimizer.param_groups[0]["lr"]
        learned, read, stop = count_tokens(window, run)
        loss_of_step = torch.zeros((), device=run.device)
        meter.mark("data")

        for micro_step, (inputs, labels) in enumerate(window.batches):
            # The last window of an epoch may be short, so the engine is told where a step ends
            # instead of counting.
            data.seed_dropout(args.seed, meter.step, micro_step, run.rank)
            engine.set_gradient_accumulation_boundary(micro_step + 1 == len(window.batches))
            loss = next_token_loss(engine, inputs, labels, learned)
            meter.mark("forward")
            # As in train_epoch_ddp the ranks are averaged; the accumulation steps are already in
            # `learned`.
            engine.backward(loss * run.world_size, scale_wrt_gas=False)
            meter.mark("backward")
            loss_of_step += loss.detach()

        dist.all_reduce(loss_of_step)
        meter.after_backward()
        gradients.hold_back_if_not_finite(engine.optimizer, loss_of_step, held_back, run)
        engine.step()
        grad_norm = engine.get_global_grad_norm()
        meter.mark("update")

        meter.end_step(loss_of_step, lr, grad_norm, read)
        saver.after_step(meter, stop)
        if meter.evaluation_is_due or meter.finished:
            break


# ======================================================================================= evaluation


@torch.no_grad()
def evaluate(model, validation, args, run: Run) -> tuple[float, float] | None:
    """Mean loss over every validation token, each counted once, and its perplexity exp(loss); None
    if asked to stop.

    The blocks are dealt to the ranks; where they do not come out even, rows without labels fill up
    the batch.
    """
    model.eval()
    limit = args.eval_samples or args.num_samples or validation.blocks
    order = range(min(limit, validation.blocks))
    total = torch.zeros(2, dtype=torch.float64, device=run.device)  # loss, tokens
    one = torch.ones((), device=run.device)
    batches = data.windows(validation, order, args.batch_size, 1, run.rank, run.world_size)
    with run.bar(
        "Evaluation", -(-len(order) // (args.batch_size * run.world_size)), "batch"
    ) as bar:
        for number, window in enumerate(data.prefetch(batches, run.device)):
            [(inputs, labels)] = window.batches
            if number % STOP_CHECK_BATCHES == 0 and run.asked_to_stop():
                return None
            with autocast(model, run):
                total[0] += next_token_loss(model, inputs, labels, one)
            total[1] += (labels[:, 1:] != data.IGNORED).sum()
            bar.advance()
    dist.all_reduce(total)
    loss = (total[0] / total[1]).item()
    return loss, math.exp(loss) if loss < 700 else math.inf


# ========================================================================================== the run


def wrap(model, args, run: Run):
    """Apply the strategy; fsdp was applied while loading.

    Returns:
        The wrapped model (DeepSpeed's engine for its strategies) and torch's optimizer (the engine
        has its own).
    """
    whole_copies = args.strategy in ("dp", "zero1", "zero2", "offload")
    if (
        args.eval_only and whole_copies
    ):  # without optimizer and gradients nothing is left for ZeRO 1 and 2 to shard
        return model.to(run.device), None
    if args.ds_config_dict:
        engine = initialize_deepspeed(model, args, run)
        return engine, engine.optimizer
    if args.strategy == "dp":
        if args.compile:
            model.compile()
        model = wrap_with_ddp(model, run)
    return model, adamw(model, args)


def train_and_evaluate(
    model, optimizer, scaler, train, validation, args, run: Run, meter, saver
) -> tuple | None:
    """All epochs, or as many as early stopping lets be; returns the last evaluation's (loss,
    perplexity), or None.
    """
    last = None

    def evaluate_now():
        if not validation.blocks:
            run.warn(f"{NOTHING_TO_EVALUATE}.")
            return None
        meter.footprint.doing = "evaluation"
        found = evaluate(model, validation, args, run)
        if found is None:
            saver.save_and_stop(meter)
        loss, perplexity = found
        run.say(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}")
        meter.log_evaluation(loss, perplexity)
        saver.after_evaluation(meter)
        return loss, perplexity

    # A checkpoint at the end of an epoch, or of the run, came before the evaluation there.
    if args.eval_only or (meter.evaluation_is_due if meter.step else args.eval_first):
        last = evaluate_now()
    while not meter.finished and not args.eval_only:
        epoch = meter.samples_done // train.blocks + 1
        if args.ds_config_dict:
            train_epoch_deepspeed(model, train, epoch, meter, saver, args, run)
        else:
            train_epoch_ddp(model, optimizer, scaler, train, epoch, meter, saver, args, run)
        if meter.evaluation_is_due:
            last = evaluate_now()
    return last


def main(args, launch) -> None:
    """Set up, load, wrap, train, evaluate, report."""
    if args.prefetch:
        prefetch(args, launch)
    try:
        run = setup_distributed(args, launch)
    except BaseException as error:
        exit_before_start(error, args.verbose, linger=2)
    try:
        run.precision = preflight.choose_precision(args.precision, run.device)
        if args.check:
            run.end_together(None, checks.check(args, run))
        engine = train_one_model(args, run)
    except Preempted as stopped:
        run.end_together(stopped.engine, EXIT_PREEMPTED)
    except BaseException as error:  # also an interrupt: no rank may be left waiting for this one
        run.end_failed(error)
    run.end_together(engine, EXIT_COMPLETED)


def train_one_model(args, run: Run):
    """The run from model to results; returns what must be taken down at the end."""
    reporting.say_setup(run)
    folder = reporting.new_output_dir(args, run)
    results = reporting.open_results(args, run, folder)
    target = export.target_of(args, folder, results.before)
    footprint = memory.Phases(run.device)
    run.memory_facts.append(footprint.describe)
    if args.memory_snapshot:
        tracing.record_memory(args.memory_snapshot, run)
    if args.ds_config_dict:
        preflight.check_requirements(args, run.device)

    # The data comes before the weights: what is wrong with it shows in seconds, however large the
    # model is.
    blueprint = find_model(args, run)
    run.ways_to_fit = lambda: preflight.ways_to_fit(args, run, blueprint)
    run.say(f"⏳ Preparing the dataset {args.dataset}")
    train, validation, dataset = prepare_dataset(args, run, blueprint.tokenizer)
    if not validation.blocks and (
        needed := [flag for flag in NEED_EVALUATIONS if getattr(args, flag)]
    ):
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")
    run.say("⏳ Loading the model")
    model, _tokenizer = load_model_and_tokenizer(args, run, blueprint)
    footprint.note("model_loaded")
    run.say("✅ Dataset ready: " + ("a stream" if args.streaming else f"{train.blocks:,} samples"))
    results.update(
        parameters=blueprint.parameters,
        trainable_parameters=blueprint.trainable,
        seq_length=args.seq_length,
        dataset=dataset,
    )
    model, optimizer = wrap(model, args, run)
    footprint.note("wrapped")
    if run.device.type == "cpu":
        keep_freed_memory()

    scaler = gradients.loss_scaler(run, run.precision == "fp16" and not args.ds_config_dict)
    identity = checkpoint.identify(args, run, blueprint, dataset, model)
    saver = checkpoint.Saver(
        args, run, folder, model, optimizer, scaler, identity, blueprint, train
    )
    over = results.over(data.total_steps(args, run.world_size, train.blocks), args)
    before = saver.resume()
    steps = data.total_steps(args, run.world_size, train.blocks, before["step"], before["samples"])
    if over or (results.was_complete and before["step"] >= steps):
        finish_again(model, saver, results, before["step"], target, args, run, blueprint)
        return model
    saves = checkpoint.saves_due(args, before, steps, train.blocks)
    export.check_room(args, run, target, folder, blueprint, saves)
    meter = metering.open_meter(
        args, run, folder, model, optimizer, blueprint, steps, before, footprint, train.blocks
    )
    # Nothing can refuse the run from here on, so files of an earlier run may be changed.
    saver.take_over(before["best"])
    results.begin()
    meter.start_log()
    run.say(
        "⏳ Evaluating"
        if args.eval_only
        else f"⏳ Training: steps {meter.step + 1} to {meter.total_steps}"
    )
    try:
        evaluation = train_and_evaluate(
            model, optimizer, scaler, train, validation, args, run, meter, saver
        )
    except Preempted:
        results.preempted(meter.counters())
        run.say(
            f"⏸️  Stopped by a signal after step {meter.step} of {meter.total_steps}: go on with --resume"
        )
        meter.close()
        raise
    footprint.note("trained")
    if args.streaming:
        results.update(dataset=train.summary())
    if args.load_best_at_end and meter.best:
        saver.load_best(meter.best["step"], meter.step)
    elif args.load_best_at_end:
        run.warn(
            "--load_best_at_end: no evaluation gave a finite loss, so these are the last weights."
        )

    results.update(checkpoint_seconds=saver.seconds)
    results.update(**reporting.summarize(run, meter, footprint, evaluation, args, blueprint))
    reporting.say_results(run, results.facts, args)
    hand_out(model, saver, results, target, args, run, blueprint, meter)
    meter.close(results.facts.get("sample"))
    run.say(f"📁 {reporting.place_of(results.path, run)}")
    return model


def finish_again(
    model, saver, results, step: int, target, args, run: Run, blueprint: models.Blueprint
) -> None:
    """--resume found a run that was complete: only export or print what was not asked for then."""
    run.say("✅ This run was complete already.")
    results.continue_complete_run()
    if args.load_best_at_end and results.facts.get("best_step"):
        saver.load_best(results.facts["best_step"], step)
    elif step < results.facts["steps"]:
        run.warn(
            "Its last weights are in no checkpoint, so nothing is exported or generated again."
        )
        return
    hand_out(model, saver, results, target, args, run, blueprint)


def hand_out(
    model, saver, results, target, args, run: Run, blueprint: models.Blueprint, meter=None
) -> None:
    """Export the trained model and print a sample, if they are asked for and not there, and
    complete the results.
    """
    there = run.from_main(results.was_complete and not args.export_hf and target.folder.exists())
    if not (args.no_export or args.eval_only or there):
        facts = {**results.facts, "merged": args.merge_lora}
        if saver.best_is_loaded:
            loss = facts["best_eval_loss"]
            facts |= {
                "eval_loss": loss,
                "perplexity": math.exp(min(loss, 700)),
                "steps": facts["best_step"],
                "train_loss_last": None,
                "tokens": None,
            }
        card = export.model_card(facts, saver.identity)

        def export_to(target: export.Target) -> dict:
            return export.export_model(model, saver.state, blueprint, target, args, run, card)

        try:
            results.update(export=export_to(target))
        except export.ExportFailed as error:
            raise export.rescue_weights(error, saver.weights_kept(meter), export_to, run) from error
    if args.generate:
        results.update(sample=sampling.generate(model, autocast(model, run), blueprint, args, run))
    run.stop.ignore()  # from here on the run only ends
    results.complete()


if __name__ == "__main__":
    main(ARGS, LAUNCH)
