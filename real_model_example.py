#!/usr/bin/env python3
"""Fine-tune a causal language model with data parallelism, DeepSpeed ZeRO or PyTorch FSDP.

    python real_model_example.py                                          # embedded model, offline
    python real_model_example.py --model gpt2 --num_samples 100           # one GPU, or the CPU
    torchrun --nproc_per_node=4 real_model_example.py --strategy zero2    # 4 GPUs, or 4 processes
    deepspeed --num_gpus=4 real_model_example.py --strategy zero3
    accelerate launch --multi_gpu --num_processes 4 real_model_example.py --strategy fsdp
    srun --ntasks=8 --kill-on-bad-exit=1 python real_model_example.py --strategy zero3   # Slurm

The flag --strategy chooses how the model is spread over the ranks. What each of N ranks stores of
the parameters (P), the gradients (G) and the optimizer states (O):

    dp        P,   G,   O      PyTorch DistributedDataParallel
    zero1     P,   G,   O/N    DeepSpeed ZeRO stage 1
    zero2     P,   G/N, O/N    DeepSpeed ZeRO stage 2
    zero3     P/N, G/N, O/N    DeepSpeed ZeRO stage 3
    offload   P,   G/N, O/N    zero2 with G and O in host memory, and the optimizer step on the CPU
    infinity  P/N, G/N, O/N    zero3 with P and O on NVMe
    fsdp      P/N, G/N, O/N    PyTorch FSDP2 (fully_shard)

All strategies train the same model: for the same global batch the losses agree, for any number of
ranks. Read main() first, then compare train_epoch_ddp() with train_epoch_deepspeed(): the lines
that differ are what DeepSpeed changes. The results are in <output_dir>/results.json and
metrics.jsonl.
"""

from __future__ import annotations

import sys

from support import process

if __name__ == "__main__":
    # Before the imports below, which take seconds: a signal that arrives during them is handled.
    process.protect_output()
    process.catch_signals(process.ALSO_IF_IGNORED)

from support import startup

if __name__ == "__main__":
    # Before torch is imported, so that --help and argument errors are printed at once, and so that
    # settings that libraries read on import (threads, allocator, offline mode) take effect.
    ARGS, LAUNCH = startup.start(sys.argv[1:])

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

from support.checkpoints import compatibility
from support.checkpoints import manager as checkpoint
from support.cli.arguments import choose_seq_length
from support.cli.conflicts import NEED_EVALUATIONS
from support.cluster.context import DistContext
from support.cluster.devices import choose_device, choose_precision, identify_gpu
from support.cluster.failures import FailureMonitor
from support.cluster.launch import exit_before_start
from support.cluster.peers import PeerMonitor
from support.cluster.process_group import group_options, simulate_process_group
from support.cluster.rendezvous import ARRIVAL_SECONDS, open_store, rendezvous
from support.cluster.stop_signal import StopSignal
from support.cluster.tuning import keep_freed_memory
from support.commands import check as checks
from support.commands.prefetch import prefetch
from support.console import Console
from support.data import batches as data
from support.data import streaming
from support.data import tokenize as tokens
from support.errors import EXIT_COMPLETED, EXIT_PREEMPTED, Preempted, UserError
from support.memory import advise
from support.memory import measure as memory
from support.model import export
from support.model import generate as sampling
from support.model import resolve as models
from support.model.loss import loss_in_place_of_logits
from support.report import console_lines, output_dir
from support.report import metrics_log as metering
from support.report import profiling as tracing
from support.report import results as reporting
from support.report.summary import summarize
from support.strategies import gradients, requirements
from support.strategies.deepspeed import OneByOne, configure_deepspeed, quiet
from support.strategy import STRATEGIES
from support.units import human_count

NOTHING_TO_EVALUATE = (
    "There is nothing to evaluate on: a corpus of one block, or a stream without --validation_file"
)
# Evaluation batches between two checks for a stop signal. Each check waits for all ranks.
STOP_CHECK_BATCHES = 8


# ================================================================================ the process group


def setup_distributed(args, launch) -> DistContext:
    """Initialize the process group: NCCL for GPUs, gloo for CPU processes.

    A single process also gets a process group, so that there is only one code path.

    Args:
        args: the command-line arguments.
        launch: this process's place in the run (rank, world size, rendezvous address), as read from
            the launcher's environment.
    Returns:
        The run: its ranks, its device, its output.
    Raises:
        TrainingError: a rank did not arrive in time, or the ranks do not fit together.
        UserError: this rank has no GPU of its own.
    """
    device = choose_device(launch)
    precision = choose_precision(args.precision, device)
    limit = timedelta(seconds=args.ddp_timeout)
    failures = FailureMonitor(
        launch, Console(launch.is_main, args.quiet, args.verbose), StopSignal()
    )
    ctx = DistContext(launch, device, "fake", failures.console, failures, precision)
    if args.simulate_gpus:
        failures.stop.install()
        simulate_process_group(launch.world_size, limit)
    else:
        ctx.backend = "nccl" if device.type == "cuda" else "gloo"
        store, ctx.attempt = rendezvous(
            launch, ctx.backend, min(args.ddp_timeout, ARRIVAL_SECONDS), identify_gpu(device)
        )
        failures.stop.install()
        # Before NCCL connects the ranks: it would wait for a rank that has already failed.
        if launch.world_size > 1:
            failures.watch(
                open_store(launch, ctx.attempt),
                PeerMonitor(open_store(launch, ctx.attempt), launch.rank, launch.world_size),
            )
        options = group_options(args, device, launch.world_size)
        dist.init_process_group(
            store=store, rank=launch.rank, world_size=launch.world_size, timeout=limit, **options
        )
        ctx.nodes = sum(ctx.all_gather(launch.is_node_leader))
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if device.type == "cuda":
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed uses it as the GPU's index

    torch.set_float32_matmul_precision("high")  # use TF32 tensor cores for fp32 where available
    if args.deterministic:
        # Not warn_only: the backward pass of attention on a GPU would not be deterministic then.
        torch.use_deterministic_algorithms(True)
    return ctx


# =================================================================================== model and data


def find_model(args, ctx: DistContext) -> models.ModelSpec:
    """Resolve --model to a configuration, its sizes and its tokenizer, without loading weights.

    Raises:
        UserError: the model cannot be used.
    """
    if not args.hub_offline:
        ctx.console.print0(f"⏳ Downloading {args.model}, where it is not in the cache")
    spec = models.find_model(args, ctx)
    action = (
        "Simulating the memory of"
        if ctx.simulated
        else "Evaluating"
        if args.eval_only
        else "Fine-tuning"
    )
    base = spec.parameters - (spec.trainable if spec.lora else 0)
    ctx.console.print0(f"🚀 {action} {args.model} ({human_count(base)} parameters)")
    ctx.console.print0(f"📋 Strategy: {args.strategy.upper()}")
    if spec.own_settings:
        ctx.console.print0(
            "🔧 gelu_new is computed as gelu_pytorch_tanh, the same function in one kernel "
            "(--no_fused_gelu keeps it)"
        )
    if not spec.chunked_loss:
        ctx.console.print0(
            "🔧 All logits of a batch are computed at once: this model changes them, or has "
            "adapters on its output layer"
        )
    return spec


def load_model_and_tokenizer(args, ctx: DistContext, spec: models.ModelSpec):
    """Load the weights: a full copy per rank, or shards for zero3, infinity and fsdp.

    Returns:
        The model, not yet wrapped by dp or by DeepSpeed, and its tokenizer.
    Raises:
        UserError: the prompt of --generate, the weights or a configuration cannot be used.
    """
    if args.generate:
        # Fail on an unusable prompt before the training, not after it.
        sampling.tokens_of(args.generate, spec.tokenizer)
    if args.strategy == "fsdp":
        model = shard_with_fsdp(spec, ctx, args)
    elif STRATEGIES[args.strategy].shards_parameters:
        model = shard_with_zero3(spec, ctx, args)
    else:
        model = spec.load(ctx)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dist.barrier()
    if not args.merge_lora:  # --merge_lora reads the weights again at the end
        ctx.temporary.clean_up(spec.weights)
    ctx.console.print0(
        f"✅ Model loaded: {spec.parameters:,} parameters ({spec.parameters / 1e6:.1f}M)"
    )
    if spec.lora:
        share = spec.trainable / spec.parameters
        ctx.console.print0(
            f"🔧 LoRA: {spec.trainable:,} of {spec.parameters:,} parameters are trained "
            f"({share:.2%})"
        )
        if spec.random and not (args.merge_lora or args.no_export):
            ctx.console.warn(
                "The frozen weights are random, and adapters are worth nothing without them: "
                "--merge_lora exports both."
            )
    return model, spec.tokenizer


def prepare_dataset(args, ctx: DistContext, tokenizer):
    """Tokenize the corpus and cut it into sequences; with --streaming, only open it.

    The tokens are computed once per node and cached for later runs.

    Returns:
        The training sequences, the validation sequences, and the dataset's entry in results.json.
    Raises:
        UserError: the corpus cannot be read, or is shorter than one sequence.
    """
    if args.streaming:
        return streaming.open_stream(args, ctx, tokenizer)
    prepared = tokens.tokenize_corpus(
        args, ctx, tokenizer, args.dataset, args.dataset_config, args.validation_file
    )
    train, validation, split_facts = data.split_sequences(prepared, args)
    tokens.print_splits(ctx, args, split_facts, tokenizer)
    bad_rows = prepared["bad_rows"]
    return (
        train,
        validation,
        {
            "name": args.dataset,
            **split_facts["train"],
            "bad_rows": bad_rows,
            "validation": split_facts["validation"],
        },
    )


# ========================================================================= one wrapper per strategy


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two parameter groups: weight decay for matrices, no decay for biases and norms."""
    # A parameter that ZeRO-3 has partitioned has an empty shape; its full shape is in ds_shape.
    is_matrix = {
        p: len(getattr(p, "ds_shape", p.shape)) >= 2 for p in model.parameters() if p.requires_grad
    }
    groups = [
        {"params": [p for p in is_matrix if is_matrix[p]], "weight_decay": weight_decay},
        {"params": [p for p in is_matrix if not is_matrix[p]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # LoRA adapters are all matrices


def adamw(model: nn.Module, args) -> torch.optim.AdamW:
    """Return the optimizer of dp and fsdp; the ds_config files configure DeepSpeed's the same."""
    return torch.optim.AdamW(
        parameter_groups(model, args.weight_decay),
        lr=args.lr,
        betas=(0.9, 0.999),
        eps=1e-8,
        fused=True,
    )


def wrap_with_ddp(model: nn.Module, ctx: DistContext) -> nn.Module:
    """Replicate the model on every rank; DDP averages the gradients during the backward pass."""
    model.to(ctx.device)
    if ctx.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
        # Gradients are views of the communication buckets, so there is no second copy of them.
        gradient_as_bucket_view=True,
        # Buffers (masks, rotary frequencies) are equal on all ranks and never change.
        broadcast_buffers=False,
    )
    if ctx.simulated:  # DDP's own all-reduce fails in the fake process group
        wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def shard_with_fsdp(spec: models.ModelSpec, ctx: DistContext, args) -> nn.Module:
    """Shard parameters, gradients and optimizer states over the ranks, per transformer block.

    The sharded model is built on the meta device, without memory. Then rank 0's weights are
    broadcast tensor by tensor, and each rank keeps its shard.
    """
    full_model = spec.load(ctx) if ctx.is_main else None
    sharded = spec.on_meta_device()
    # bf16: compute in bf16, but keep the shards and reduce the gradients in fp32. fp16 is left to
    # autocast(), below.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if ctx.precision == "bf16" else None, reduce_dtype=torch.float32
    )
    options = args.fsdp
    offload = (
        CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
        if options.offload
        else OffloadPolicy()
    )
    shard_options = {
        "mesh": ctx.mesh(options.hybrid),
        "mp_policy": policy,
        "offload_policy": offload,
    }
    blocks = models.blocks_to_shard(sharded, options, ctx)
    for block in blocks:
        if args.compile:
            block.compile()
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **shard_options)
    fully_shard(sharded, **shard_options)
    if options.forward_prefetch:
        for block, next_block in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([next_block])
    sharded.to_empty(device="cpu" if options.offload else ctx.device)
    models.fill_from_rank0(sharded, full_model, ctx)
    return sharded


def shard_with_zero3(spec: models.ModelSpec, ctx: DistContext, args) -> nn.Module:
    """Shard each parameter over the ranks as it is read; infinity writes its shard to NVMe.

    Loading maps the weight file into memory without reading it. Each parameter is then copied and
    partitioned in turn, so that a rank never holds more than its shards and one full parameter.
    """
    import deepspeed

    # "auto" is the file's own dtype: a conversion here would copy the whole model.
    model = spec.load(ctx, dtype="auto")
    with quiet(args.verbose):
        deepspeed.zero.Init(
            module=OneByOne(model, models.DTYPES[ctx.precision]),
            config_dict_or_path=args.ds_config_dict,
        )
    for buffer in model.buffers():  # DeepSpeed neither shards nor moves them
        buffer.data = buffer.data.to(ctx.device)
    return model


def initialize_deepspeed(model: nn.Module, args, ctx: DistContext):
    """Create the DeepSpeed engine: model and optimizer as the JSON file configures them.

    With --eval_only the engine has no optimizer.
    """
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
    """Return the learning rate of a step: linear warm-up to --lr, then --lr_scheduler.

    Args:
        step: the optimizer step, counted from 0.
        total_steps: the step at which "linear" and "cosine" reach 0.
        args: --lr, --warmup_steps, --lr_scheduler.
    """
    if step < args.warmup_steps:
        return args.lr * (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return args.lr * factors[args.lr_scheduler]


def set_learning_rate(optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups of PyTorch's or DeepSpeed's optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def next_token_loss(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Run the forward pass and return the sum of the next-token cross entropies / `tokens`.

    Args:
        model: as wrapped by the strategy.
        inputs: token ids, int64 [batch, length].
        labels: int64 [batch, length]; data.IGNORED for tokens without a loss.
        tokens: scalar tensor, the valid tokens of the whole step on all ranks. The losses of all
            micro-batches and ranks then add up to the mean over tokens.
    Returns:
        The loss, a scalar in fp32.
    """
    # Shift the labels, not the logits: this saves a copy of the largest tensor of the step.
    targets = F.pad(labels[:, 1:], (0, 1), value=data.IGNORED)
    with loss_in_place_of_logits(model, targets, tokens) as chunked:
        output = model(input_ids=inputs, use_cache=False).logits
    if chunked:  # the output layer computed the loss in chunks, so the full logits never existed
        return output
    logits = output.flatten(0, 1).float()
    return (
        F.cross_entropy(logits, targets.flatten(), ignore_index=data.IGNORED, reduction="sum")
        / tokens
    )


def count_tokens(step_batch: data.StepBatch, ctx: DistContext) -> torch.Tensor:
    """Count the tokens of one optimizer step over all micro-batches and ranks, in one all-reduce.

    Returns:
        fp32 [3] on the device: valid tokens (those with a loss), all tokens without padding, and
        the number of ranks that received a stop signal.
    """
    counts = torch.zeros(3, device=ctx.device)
    counts[0] = sum((labels[:, 1:] != data.IGNORED).sum() for _, labels in step_batch.batches)
    counts[1].fill_(step_batch.tokens)
    counts[2].fill_(bool(ctx.stop.requested))
    dist.all_reduce(counts)
    return counts


def autocast(model: nn.Module, ctx: DistContext):
    """Return the autocast context for 16-bit computation with fp32 weights.

    It is disabled where the weights are converted anyway: by DeepSpeed's engine, and by FSDP2's
    mixed-precision policy in bf16.
    """
    by_fsdp = isinstance(model, FSDPModule) and ctx.precision == "bf16"
    converted = by_fsdp or hasattr(model, "set_gradient_accumulation_boundary")
    return torch.autocast(
        ctx.device.type,
        models.DTYPES[ctx.precision],
        enabled=ctx.precision != "fp32" and not converted,
    )


@contextlib.contextmanager
def gradient_sync(model: nn.Module, needed: bool):
    """Reduce the gradients over the ranks in this backward pass only if `needed`.

    With gradient accumulation only the last micro-batch of a step needs it.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(needed)
    skip_ddp_sync = isinstance(model, DistributedDataParallel) and not needed
    with model.no_sync() if skip_ddp_sync else contextlib.nullcontext():
        yield


def step_batches_of_epoch(train, epoch: int, done: int, args, ctx: DistContext):
    """Iterate over this rank's step batches of one epoch, on the device; see data.step_batches.

    Args:
        train: the training sequences.
        epoch: counted from 1; it seeds the order of the sequences.
        done: leave out the first `done` sequences of the epoch, which were trained on before a
            resume or an evaluation.
    """
    if args.streaming:
        return train.step_batches(ctx.device)
    order = data.epoch_order(train.num_sequences, args.seed, epoch)[done:]
    step_batches = data.step_batches(
        train, order, args.batch_size, args.gradient_accumulation_steps, ctx.rank, ctx.world_size
    )
    return data.prefetch(step_batches, ctx.device)


def train_epoch_ddp(model, optimizer, scaler, train, epoch, meter, manager, args, ctx):
    """Train one epoch in plain PyTorch, for dp and fsdp; end early if an evaluation is due."""
    model.train()
    # Set once a loss, or without loss scaling a gradient, is not finite: later updates are skipped,
    # and the run ends when the loss is next logged. On the device, so that no step waits for it.
    found_inf = torch.zeros((), dtype=torch.bool, device=ctx.device)

    meter.start_epoch(epoch)
    for step_batch in step_batches_of_epoch(train, epoch, meter.position, args, ctx):
        lr = learning_rate(meter.step, meter.total_steps, args)
        set_learning_rate(optimizer, lr)
        valid_tokens, total_tokens, stop = count_tokens(step_batch, ctx)
        loss_of_step = torch.zeros((), device=ctx.device)
        meter.mark("data")

        for micro_step, (inputs, labels) in enumerate(step_batch.batches):
            data.seed_dropout(args.seed, meter.step, micro_step, ctx.rank)
            with gradient_sync(model, needed=micro_step + 1 == len(step_batch.batches)):
                with autocast(model, ctx):
                    loss = next_token_loss(model, inputs, labels, valid_tokens)
                meter.mark("forward")
                # DDP and FSDP average the gradients over the ranks. `valid_tokens` already counts
                # the tokens of all ranks, so the factor world_size turns the average into a sum.
                scaler.scale(loss * ctx.world_size).backward()
                meter.mark("backward")
            loss_of_step += loss.detach()

        dist.all_reduce(loss_of_step)  # the sum over the ranks is the mean over all valid tokens
        meter.after_backward()
        scaler.unscale_(optimizer)
        grad_norm = gradients.norm(model)
        if args.max_grad_norm:
            nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, grad_norm)
        gradients.skip_update_if_not_finite(
            optimizer, loss_of_step, found_inf, ctx, scaler, grad_norm
        )
        scaler.step(optimizer)  # in fp32 and bf16 the scaler is disabled: just optimizer.step()
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.mark("update")

        meter.end_step(loss_of_step, lr, grad_norm, total_tokens)
        manager.after_step(meter, stop)
        if meter.evaluation_is_due or meter.finished:
            break


def train_epoch_deepspeed(engine, train, epoch, meter, manager, args, ctx):
    """Train one epoch with DeepSpeed; end early if an evaluation is due.

    The engine scales the loss (fp16), clips the gradients, updates the weights and clears the
    gradients.
    """
    engine.train()
    found_inf = torch.zeros((), dtype=torch.bool, device=ctx.device)

    meter.start_epoch(epoch)
    for step_batch in step_batches_of_epoch(train, epoch, meter.position, args, ctx):
        if engine.lr_scheduler is None:  # else the user's DeepSpeed file defines the schedule
            set_learning_rate(engine.optimizer, learning_rate(meter.step, meter.total_steps, args))
        lr = engine.optimizer.param_groups[0]["lr"]
        valid_tokens, total_tokens, stop = count_tokens(step_batch, ctx)
        loss_of_step = torch.zeros((), device=ctx.device)
        meter.mark("data")

        for micro_step, (inputs, labels) in enumerate(step_batch.batches):
            # The last step batch of an epoch may have fewer micro-batches, so the engine must not
            # find the end of a step by counting.
            data.seed_dropout(args.seed, meter.step, micro_step, ctx.rank)
            engine.set_gradient_accumulation_boundary(micro_step + 1 == len(step_batch.batches))
            loss = next_token_loss(engine, inputs, labels, valid_tokens)
            meter.mark("forward")
            # As in train_epoch_ddp() the gradients are averaged over the ranks. `valid_tokens`
            # covers all micro-batches, so the engine must not divide by their number again.
            engine.backward(loss * ctx.world_size, scale_wrt_gas=False)
            meter.mark("backward")
            loss_of_step += loss.detach()

        dist.all_reduce(loss_of_step)
        meter.after_backward()
        gradients.skip_update_if_not_finite(engine.optimizer, loss_of_step, found_inf, ctx)
        engine.step()
        grad_norm = engine.get_global_grad_norm()
        meter.mark("update")

        meter.end_step(loss_of_step, lr, grad_norm, total_tokens)
        manager.after_step(meter, stop)
        if meter.evaluation_is_due or meter.finished:
            break


# ======================================================================================= evaluation


@torch.no_grad()
def evaluate(model, validation, args, ctx: DistContext) -> tuple[float, float] | None:
    """Compute the mean loss over the validation tokens and the perplexity exp(loss).

    The sequences are divided among the ranks. Where they do not divide evenly, a batch is padded
    with sequences whose labels are all ignored, so that every token counts exactly once.

    Returns:
        (loss in nats per token, perplexity), or None if a rank received a stop signal.
    """
    model.eval()
    limit = args.eval_samples or args.num_samples or validation.num_sequences
    order = range(min(limit, validation.num_sequences))
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)  # loss, tokens
    divisor = torch.ones((), device=ctx.device)
    batches = data.step_batches(validation, order, args.batch_size, 1, ctx.rank, ctx.world_size)
    with ctx.console.bar(
        "Evaluation", -(-len(order) // (args.batch_size * ctx.world_size)), "batch"
    ) as bar:
        for number, step_batch in enumerate(data.prefetch(batches, ctx.device)):
            [(inputs, labels)] = step_batch.batches
            if number % STOP_CHECK_BATCHES == 0 and ctx.asked_to_stop():
                return None
            with autocast(model, ctx):
                total[0] += next_token_loss(model, inputs, labels, divisor)
            total[1] += (labels[:, 1:] != data.IGNORED).sum()
            bar.advance()
    dist.all_reduce(total)
    loss = (total[0] / total[1]).item()
    return loss, math.exp(loss) if loss < 700 else math.inf


# ========================================================================================== the run


def wrap(model, args, ctx: DistContext):
    """Wrap the model with DDP or DeepSpeed; fsdp was applied while loading.

    Returns:
        The wrapped model (for DeepSpeed the engine) and the optimizer. With --eval_only the
        optimizer is None where the model stays unwrapped.
    """
    replicated = not STRATEGIES[args.strategy].shards_parameters
    # Without optimizer and gradients ZeRO stages 1 and 2 have nothing to shard.
    if args.eval_only and replicated:
        return model.to(ctx.device), None
    if args.ds_config_dict:
        engine = initialize_deepspeed(model, args, ctx)
        return engine, engine.optimizer
    if args.strategy == "dp":
        if args.compile:
            model.compile()
        model = wrap_with_ddp(model, ctx)
    return model, adamw(model, args)


def train_and_evaluate(
    model, optimizer, scaler, train, validation, args, ctx: DistContext, meter, manager
) -> tuple | None:
    """Train all epochs, or until early stopping, and evaluate whenever an evaluation is due.

    Returns:
        (loss, perplexity) of the last evaluation, or None if there was none.
    Raises:
        Preempted: a rank received a stop signal, and the checkpoint is complete.
        TrainingError: the loss is not finite, or a checkpoint cannot be written.
    """
    last_evaluation = None

    def evaluate_now():
        if not validation.num_sequences:
            ctx.console.warn(f"{NOTHING_TO_EVALUATE}.")
            return None
        meter.memory_by_phase.doing = "evaluation"
        evaluation = evaluate(model, validation, args, ctx)
        if evaluation is None:
            manager.save_and_stop(meter)
        loss, perplexity = evaluation
        ctx.console.print0(f"Evaluation | Loss: {loss:.4f} | Perplexity: {perplexity:.2f}")
        meter.log_evaluation(loss, perplexity)
        manager.after_evaluation(meter)
        return loss, perplexity

    # A checkpoint at the end of an epoch or of the run is saved before the evaluation, so a resumed
    # run may begin with that evaluation.
    if args.eval_only or (meter.evaluation_is_due if meter.step else args.eval_first):
        last_evaluation = evaluate_now()
    while not meter.finished and not args.eval_only:
        epoch = meter.samples_done // train.num_sequences + 1
        if args.ds_config_dict:
            train_epoch_deepspeed(model, train, epoch, meter, manager, args, ctx)
        else:
            train_epoch_ddp(model, optimizer, scaler, train, epoch, meter, manager, args, ctx)
        if meter.evaluation_is_due:
            last_evaluation = evaluate_now()
    return last_evaluation


def main(args, launch) -> None:
    """Set up the process group, run the training, and end all ranks together.

    Never returns normally: the process ends with an exit code of support/errors.py.
    """
    if args.prefetch:
        prefetch(args, launch)
    try:
        ctx = setup_distributed(args, launch)
    except BaseException as error:
        exit_before_start(error, args.verbose, linger=2)
    try:
        if args.check:
            ctx.failures.end_together(None, checks.check(args, ctx))
        engine = train_one_model(args, ctx)
    except Preempted as preempted:
        ctx.failures.end_together(preempted.engine, EXIT_PREEMPTED)
    except BaseException as error:  # also KeyboardInterrupt: no other rank may wait for this one
        ctx.failures.end_failed(error)
    ctx.failures.end_together(engine, EXIT_COMPLETED)


def train_one_model(args, ctx: DistContext):
    """Load, wrap, train, evaluate, export and report.

    Returns:
        The wrapped model; a DeepSpeed engine must be destroyed before the process ends.
    Raises:
        UserError: an argument, the data, the model or the checkpoint to resume cannot be used.
        TrainingError: the run failed.
        Preempted: a rank received a stop signal, and the checkpoint is complete.
    """
    console_lines.say_setup(ctx)
    folder = output_dir.new_output_dir(args, ctx)
    results = reporting.open_results(args, ctx, folder)
    target = export.target_of(args, folder, results.before)
    memory_by_phase = memory.MemoryByPhase(ctx.device)
    ctx.failures.memory_facts.append(memory_by_phase.describe)
    at_end = [tracing.record_memory(args.memory_snapshot, ctx)] if args.memory_snapshot else []
    if args.ds_config_dict:
        requirements.check_requirements(args, ctx.device)

    # The data is prepared before the weights are loaded: errors in it show within seconds, however
    # large the model is.
    spec = find_model(args, ctx)
    positions = models.max_positions(spec.config)
    args = args.replace(seq_length=choose_seq_length(args, positions))
    ctx.failures.remedies = lambda: advise.ways_to_fit(args, ctx, spec)
    ctx.console.print0(f"⏳ Preparing the dataset {args.dataset}")
    train, validation, dataset = prepare_dataset(args, ctx, spec.tokenizer)
    if not validation.num_sequences and (
        needed := [flag for flag in NEED_EVALUATIONS if getattr(args, flag)]
    ):
        raise UserError(f"{NOTHING_TO_EVALUATE}, and --{needed[0]} needs it.")
    ctx.console.print0("⏳ Loading the model")
    if args.ds_config_dict:
        args = args.replace(ds_config_dict=configure_deepspeed(args, ctx, spec))
    model, _tokenizer = load_model_and_tokenizer(args, ctx, spec)
    memory_by_phase.note("model_loaded")
    ctx.console.print0(
        "✅ Dataset ready: "
        + ("a stream" if args.streaming else f"{train.num_sequences:,} samples")
    )
    results.update(
        parameters=spec.parameters,
        trainable_parameters=spec.trainable,
        seq_length=args.seq_length,
        dataset=dataset,
    )
    model, optimizer = wrap(model, args, ctx)
    memory_by_phase.note("wrapped")
    if ctx.device.type == "cpu":
        keep_freed_memory()

    scaler = gradients.loss_scaler(ctx, ctx.precision == "fp16" and not args.ds_config_dict)
    identity = compatibility.run_signature(args, ctx, spec, dataset, model)
    objects = checkpoint.TrainingObjects(
        model, optimizer, scaler, stream=train if args.streaming else None
    )
    manager = checkpoint.CheckpointManager(args, ctx, folder, objects, identity, spec)
    nothing_left_to_do = results.nothing_left_to_do(
        data.total_steps(args, ctx.world_size, train.num_sequences), args
    )
    counters = manager.resume()  # of the checkpoint, or of a new run
    steps = data.total_steps(
        args, ctx.world_size, train.num_sequences, counters["step"], counters["samples"]
    )
    if nothing_left_to_do or (results.was_complete and counters["step"] >= steps):
        finalize_completed_run(model, manager, results, counters["step"], target, args, ctx, spec)
        return model
    saves = checkpoint.saves_due(args, counters, steps, train.num_sequences)
    export.check_room(args, ctx, target, folder, spec, saves)
    meter = metering.open_meter(
        args,
        ctx,
        folder,
        model,
        optimizer,
        spec,
        steps,
        counters,
        memory_by_phase,
        train.num_sequences,
    )
    manager.after_save.append(meter.restart_clock)  # leave the time of a save out of the next step
    meter.at_end += at_end
    # All checks have passed: only now may files of an earlier run be changed.
    manager.take_over(counters["best"])
    results.begin()
    meter.start_log()
    ctx.console.print0(
        "⏳ Evaluating"
        if args.eval_only
        else f"⏳ Training: steps {meter.step + 1} to {meter.total_steps}"
    )
    try:
        evaluation = train_and_evaluate(
            model, optimizer, scaler, train, validation, args, ctx, meter, manager
        )
    except Preempted:
        results.preempted(meter.counters())
        ctx.console.print0(
            f"⏸️  Stopped by a signal after step {meter.step} of {meter.total_steps}: "
            "go on with --resume"
        )
        meter.close()
        raise
    memory_by_phase.note("trained")
    if args.streaming:
        results.update(dataset=train.summary())
    if args.load_best_at_end and meter.best:
        manager.load_best(meter.best["step"], meter.step)
    elif args.load_best_at_end:
        ctx.console.warn(
            "--load_best_at_end: no evaluation gave a finite loss, so these are the last weights."
        )

    results.update(checkpoint_seconds=manager.seconds)
    results.update(**summarize(ctx, meter, memory_by_phase, evaluation, args, spec))
    console_lines.say_results(ctx, results.facts, args)
    finalize(model, manager, results, target, args, ctx, spec, meter)
    meter.close(results.facts.get("sample"))
    ctx.console.print0(f"📁 {console_lines.place_of(results.path, ctx)}")
    return model


def finalize_completed_run(
    model, manager, results, step: int, target, args, ctx: DistContext, spec: models.ModelSpec
) -> None:
    """Finish a resumed run that was already complete: only export and generate what is missing."""
    ctx.console.print0("✅ This run was complete already.")
    results.continue_complete_run()
    if args.load_best_at_end and results.facts.get("best_step"):
        manager.load_best(results.facts["best_step"], step)
    elif step < results.facts["steps"]:
        ctx.console.warn(
            "Its last weights are in no checkpoint, so nothing is exported or generated again."
        )
        return
    finalize(model, manager, results, target, args, ctx, spec)


def finalize(
    model, manager, results, target, args, ctx: DistContext, spec: models.ModelSpec, meter=None
) -> None:
    """Export the model and print a sample, if requested and missing, and complete the results.

    Args:
        meter: the run's counters; None for a run that was complete before it was resumed.
    Raises:
        TrainingError: the export failed; the message says where the trained weights are.
    """
    export.finish(manager, results, target, args, meter)
    if args.generate:
        results.update(sample=sampling.generate(model, autocast(model, ctx), spec, args, ctx))
    ctx.stop.ignore()  # a stop signal has nothing left to stop
    results.complete()


if __name__ == "__main__":
    main(ARGS, LAUNCH)
