#!/usr/bin/env python3
"""Fine-tune a causal language model with data parallelism, DeepSpeed ZeRO or PyTorch FSDP.

    python real_model_example.py                                          # embedded model, offline
    python real_model_example.py --model gpt2 --num_samples 100           # one GPU, or the CPU
    torchrun --nproc_per_node=4 real_model_example.py --strategy zero2    # 4 GPUs or CPU processes
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

All strategies train the same model: for the same global batch and without dropout the losses agree,
for any number of ranks. Read from the top; compare train_epoch_ddp() with train_epoch_deepspeed():
the lines that differ are what DeepSpeed changes. The results are in <output_dir>/results.json and
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
    # Before torch is imported: --help and argument errors are printed at once, and settings that
    # libraries read on import (threads, allocator, offline mode) take effect.
    ARGS, LAUNCH = startup.start(sys.argv[1:])

import itertools
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from support.checkpoints.compatibility import run_signature
from support.checkpoints.find import find_checkpoint
from support.checkpoints.manager import CheckpointManager, TrainingObjects
from support.cli.arguments import Arguments, choose_seq_length
from support.cli.ds_config import check_with_deepspeed, write_ds_config
from support.cluster.context import DistContext
from support.cluster.devices import choose_device, choose_precision, unused_gpu
from support.cluster.launch import Launch, exit_before_start
from support.cluster.process_group import connect_ranks, group_options
from support.cluster.tuning import keep_freed_memory
from support.commands import command_of
from support.console import Console
from support.data import batches as data
from support.data import streaming
from support.errors import EXIT_COMPLETED, EXIT_PREEMPTED, Preempted
from support.labels import IGNORED
from support.memory.advise import ways_to_fit
from support.model import layers, weights
from support.model import resolve as models
from support.model.loss import next_token_loss
from support.report.run import Run
from support.strategies import optimizer as optim
from support.strategies.contexts import autocast, gradient_sync, sharding_options
from support.strategies.deepspeed import configure_deepspeed, partition_parameters, quiet
from support.strategies.gradients import gradient_norm, loss_scaler, skip_update_if_not_finite
from support.strategies.requirements import check_requirements
from support.strategy import STRATEGIES, Engine
from support.train_state import TrainState


def main(args: Arguments, launch: Launch) -> None:
    """Set up the process group, run the training, and end all ranks together.

    Never returns normally: the process ends with an exit code of support/errors.py.
    """
    startup.end_of_imports()
    try:
        ctx = setup_distributed(args, launch)
    except BaseException as error:
        exit_before_start(error, args.verbose, linger=2)
    try:
        check_with_deepspeed(args)  # the keys and values of --ds_config
        ctx.precision = choose_precision(args.precision, ctx.device)
        if command := command_of(args):  # --check, --show_sample
            ctx.failures.end_together(None, command(args, ctx))  # does not return
        model = train(args, ctx)
    except Preempted as preempted:
        ctx.failures.end_together(preempted.engine, EXIT_PREEMPTED)
    except BaseException as error:  # also KeyboardInterrupt: no other rank may wait for this one
        ctx.failures.end_failed(error)
    ctx.failures.end_together(model, EXIT_COMPLETED)


def train(args: Arguments, ctx: DistContext) -> nn.Module:
    """Load, wrap, resume, train, evaluate, export and report.

    Returns:
        The wrapped model; a DeepSpeed engine must be destroyed before the process ends.
    Raises:
        UserError: an argument, the data, the model or the checkpoint to resume cannot be used.
        TrainingError: the run failed.
        Preempted: a rank received a stop signal, and the checkpoint is complete.
    """
    run = Run.open(args, ctx)  # the output folder, results.json, memory after each phase
    found = find_checkpoint(args, ctx, run.folder)  # of --resume, before anything is loaded
    check_requirements(args)

    # The data is prepared first, so that errors in it are reported before the weights are loaded.
    models.configure_transformers(args)
    spec = models.find_model(args, ctx)
    args = args.replace(seq_length=choose_seq_length(args, layers.max_positions(spec.config)))
    run.announce_model(args, spec)
    ctx.failures.remedies = lambda: ways_to_fit(args, ctx, spec)  # printed if memory runs out
    train_data, validation, dataset = prepare_dataset(args, ctx, spec.tokenizer)
    if args.ds_config_dict:
        args = args.replace(ds_config_dict=configure_deepspeed(args, ctx, spec))
        if ctx.is_main:
            write_ds_config(args, run.folder)  # runs as it is with --ds_config
    model, _tokenizer = load_model_and_tokenizer(args, ctx, spec)
    run.model_loaded(args, spec, dataset, train_data)
    objects = wrap(model, train_data, args, ctx)
    run.memory.note("wrapped")
    keep_freed_memory(ctx.device)  # for the next step; see support/cluster/tuning.py

    signature = run_signature(args, ctx, spec, dataset, objects.model)
    manager = CheckpointManager(args, ctx, run.folder, objects, signature, spec)
    counters = manager.resume(found)  # of the checkpoint, or zeros
    state = data.train_state(counters, train_data, args, ctx.world_size)
    if run.was_complete_before(args, state):
        run.finish_completed_run(args, manager, state, autocast(objects.model, ctx))
        return objects.model
    run.start_training(args, objects, manager, state)
    try:
        eval_loss = train_and_evaluate(objects, (train_data, validation), state, run, args, ctx)
    except Preempted:
        run.preempted(state)
        raise
    run.finish(args, state, eval_loss, autocast(objects.model, ctx))
    return objects.model


def train_and_evaluate(
    objects: TrainingObjects,
    datasets: tuple[Any, Any],
    state: TrainState,
    run: Run,
    args: Arguments,
    ctx: DistContext,
) -> float | None:
    """Train all epochs, or until early stopping, and evaluate whenever an evaluation is due.

    Args:
        datasets: the training sequences and the validation sequences.
    Returns:
        The loss of the last evaluation, or None if there was none.
    Raises:
        Preempted: a rank received a stop signal, and the checkpoint is complete.
        TrainingError: the loss is not finite, or a checkpoint cannot be written.
    """
    (train_data, validation), metrics, manager = datasets, run.metrics, run.manager
    train_epoch = ENGINES[STRATEGIES[args.strategy].engine].train_epoch
    # A checkpoint is saved before an evaluation of the same step, so a resume may begin with it.
    due = args.eval_only or (state.evaluation_is_due if state.step else args.eval_first)
    eval_loss = None
    while True:
        if due and validation.num_sequences:
            metrics.start_evaluation()
            eval_loss = evaluate(objects.model, validation, args, ctx)
            if eval_loss is None:  # a rank received a stop signal
                manager.preempt(state)
            state.add_evaluation(eval_loss)  # early stopping may end the run
            metrics.log_evaluation(eval_loss)
            manager.after_evaluation(state)
        elif due:
            ctx.console.warn(f"{data.NOTHING_TO_EVALUATE}.")
        if state.finished:  # with --eval_only there is no step to train
            return eval_loss
        step_batches = data.rest_of_epoch(train_data, state, args, ctx)
        train_epoch(objects, step_batches, state, run, args, ctx)
        due = state.evaluation_is_due


# ========================================================================= the two training loops
def train_epoch_ddp(
    objects: TrainingObjects,
    step_batches: Iterable[data.StepBatch],
    state: TrainState,
    run: Run,
    args: Arguments,
    ctx: DistContext,
) -> None:
    """Train the rest of an epoch in plain PyTorch (dp, fsdp), or until an evaluation is due."""
    metrics, manager = run.metrics, run.manager
    model, optimizer, scaler = objects.model, objects.optimizer, objects.scaler
    model.train()
    # True after the first non-finite loss (or gradient norm, unless in fp16): this and all later
    # updates are skipped, and the run ends when the loss is next logged. On the device, so that the
    # host need not wait for it.
    found_inf = torch.zeros((), dtype=torch.bool, device=ctx.device)
    metrics.start_epoch()

    for step_batch in step_batches:
        lr = optim.learning_rate(state.step, state.total_steps, args)
        optim.set_learning_rate(optimizer, lr)
        # Tokens of all micro-batches on all ranks. Sequences may have different numbers of valid
        # tokens, so a mean over micro-batches or ranks would weight their tokens differently.
        valid_tokens, total_tokens, ranks_to_stop = count_tokens(step_batch, ctx)
        step_loss = torch.zeros((), device=ctx.device)
        metrics.mark("data")

        for micro_step, (inputs, labels, positions) in enumerate(step_batch.batches):
            is_last = micro_step + 1 == len(step_batch.batches)
            data.seed_dropout(args.seed, state.step, micro_step, ctx.rank)
            with gradient_sync(model, needed=is_last):  # reduce the gradients once per step
                with autocast(model, ctx):
                    loss = next_token_loss(model, inputs, labels, valid_tokens, positions)
                metrics.mark("forward")
                # DDP and FSDP average the gradients over the ranks. `valid_tokens` already counts
                # the tokens of all ranks, so the factor world_size turns the average into a sum.
                scaler.scale(loss * ctx.world_size).backward()
                metrics.mark("backward")
            step_loss += loss.detach()

        dist.all_reduce(step_loss)  # the sum over the ranks is the mean over all valid tokens
        metrics.after_backward()
        scaler.unscale_(optimizer)  # fp16 only; in fp32 and bf16 the scaler is disabled
        grad_norm = gradient_norm(model)
        if args.max_grad_norm:
            nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, grad_norm)
        skip_update_if_not_finite(optimizer, step_loss, found_inf, ctx, scaler, grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        metrics.mark("update")

        state.advance()
        # The host waits for the GPU only where a line is logged or a checkpoint is saved, for the
        # previous step's stop signals, and with the optimizer on the CPU for found_inf.
        metrics.end_step(step_loss, lr, grad_norm, total_tokens)
        manager.after_step(state, ranks_to_stop)
        if state.evaluation_is_due or state.finished:
            break


def train_epoch_deepspeed(
    objects: TrainingObjects,
    step_batches: Iterable[data.StepBatch],
    state: TrainState,
    run: Run,
    args: Arguments,
    ctx: DistContext,
) -> None:
    """Train the rest of an epoch with DeepSpeed, or until an evaluation is due."""
    metrics, manager = run.metrics, run.manager
    engine, optimizer = objects.model, objects.optimizer  # the engine scales the loss in fp16
    engine.train()
    # As in train_epoch_ddp, for losses only: DeepSpeed computes the norm inside its update.
    found_inf = torch.zeros((), dtype=torch.bool, device=ctx.device)
    metrics.start_epoch()

    for step_batch in step_batches:
        if engine.lr_scheduler is None:  # else the user's DeepSpeed file defines the schedule
            scheduled = optim.learning_rate(state.step, state.total_steps, args)
            optim.set_learning_rate(optimizer, scheduled)
        lr = optimizer.param_groups[0]["lr"]
        valid_tokens, total_tokens, ranks_to_stop = count_tokens(step_batch, ctx)
        step_loss = torch.zeros((), device=ctx.device)
        metrics.mark("data")

        for micro_step, (inputs, labels, positions) in enumerate(step_batch.batches):
            is_last = micro_step + 1 == len(step_batch.batches)
            data.seed_dropout(args.seed, state.step, micro_step, ctx.rank)
            # The last step batch of an epoch may have fewer micro-batches, so the engine must not
            # find the end of a step by counting.
            engine.set_gradient_accumulation_boundary(is_last)
            loss = next_token_loss(engine, inputs, labels, valid_tokens, positions)
            metrics.mark("forward")
            # The factor world_size is as in train_epoch_ddp. `valid_tokens` covers all
            # micro-batches, so the engine must not divide by their number (scale_wrt_gas).
            engine.backward(loss * ctx.world_size, scale_wrt_gas=False)
            metrics.mark("backward")
            step_loss += loss.detach()

        dist.all_reduce(step_loss)
        metrics.after_backward()
        skip_update_if_not_finite(optimizer, step_loss, found_inf, ctx)
        engine.step()  # clips the gradients, updates the weights and clears the gradients
        grad_norm = engine.get_global_grad_norm()
        metrics.mark("update")

        state.advance()
        metrics.end_step(step_loss, lr, grad_norm, total_tokens)
        manager.after_step(state, ranks_to_stop)
        if state.evaluation_is_due or state.finished:
            break


# ==================================================================== parts of a step, evaluation
def count_tokens(step_batch: data.StepBatch, ctx: DistContext) -> torch.Tensor:
    """Count the tokens of one optimizer step over all micro-batches and ranks, in one all-reduce.

    Returns:
        fp32 [3] on the device, which unpacks into scalar tensors: valid tokens (those with a loss),
        all tokens without padding, and the number of ranks that received a stop signal.
    """
    counts = torch.zeros(3, device=ctx.device)
    counts[0] = sum((labels[:, 1:] != IGNORED).sum() for _, labels, _ in step_batch.batches)
    counts[1].fill_(step_batch.tokens)
    counts[2].fill_(bool(ctx.stop.requested))
    dist.all_reduce(counts)
    return counts


@torch.no_grad()
def evaluate(model: nn.Module, validation, args: Arguments, ctx: DistContext) -> float | None:
    """Compute the mean loss over the validation tokens.

    The sequences are divided among the ranks. Where they do not divide evenly, a batch is padded
    with sequences whose labels are all ignored, so that every token counts exactly once.

    Returns:
        The loss in nats per token, or None if a rank received a stop signal.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)  # loss, tokens
    divisor = torch.ones((), device=ctx.device)
    batches, count = data.evaluation_batches(validation, args, ctx)
    with ctx.console.bar("Evaluation", count, "batch") as bar:
        for number, (inputs, labels, positions) in enumerate(batches):
            # Not for each batch, because all ranks wait for each other here.
            if number % 8 == 0 and ctx.asked_to_stop():
                return None
            with autocast(model, ctx):
                total[0] += next_token_loss(model, inputs, labels, divisor, positions)
            total[1] += (labels[:, 1:] != IGNORED).sum()
            bar.update()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ==================================================================== strategies: PyTorch DDP (dp)
def wrap_with_ddp(model: nn.Module, args: Arguments, ctx: DistContext) -> nn.Module:
    """Replicate the model on every rank; DDP averages the gradients during the backward pass."""
    if args.compile:
        model.compile()
    model.to(ctx.device)
    if ctx.world_size == 1:
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
        # After the reduction the gradients are views of the communication buckets, not a copy.
        gradient_as_bucket_view=True,
        # Buffers (masks, rotary frequencies) are equal on all ranks and never change.
        broadcast_buffers=False,
    )
    if ctx.simulated:  # DDP's own all-reduce fails in the fake process group
        wrapped.register_comm_hook(None, noop_hook)
    return wrapped


# ================================================================ strategies: PyTorch FSDP2 (fsdp)
def shard_with_fsdp(args: Arguments, ctx: DistContext, spec: models.ModelSpec) -> nn.Module:
    """Shard parameters, gradients and optimizer states over the ranks, per transformer block.

    The sharded model is built on the meta device, without memory. Then rank 0's weights are
    broadcast tensor by tensor, and each rank keeps its shard.
    """
    from torch.distributed.fsdp import fully_shard

    full_model = spec.load(ctx) if ctx.is_main else None
    sharded = spec.on_meta_device()
    options = sharding_options(args, ctx)  # mesh, precision, CPU offload
    blocks = layers.blocks_to_shard(sharded, args.fsdp, ctx)
    for block in blocks:
        if args.compile:
            block.compile()
        fully_shard(block, reshard_after_forward=args.fsdp.reshard_after_forward, **options)
    fully_shard(sharded, **options)  # the root stays gathered from forward to backward
    if args.fsdp.forward_prefetch:
        for block, next_block in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([next_block])
    sharded.to_empty(device="cpu" if args.fsdp.offload else ctx.device)
    weights.fill_from_rank0(sharded, full_model, ctx)
    return sharded


# ================================= strategies: DeepSpeed (zero1, zero2, zero3, offload, infinity)
def load_for_zero(args: Arguments, ctx: DistContext, spec: models.ModelSpec) -> nn.Module:
    """Load the model. Stage 3 shards each parameter as it is read; infinity puts it on NVMe.

    The weight file is mapped into memory. Each parameter is then copied and partitioned in turn, so
    that a rank never holds more than its shards and one full parameter.
    """
    if not STRATEGIES[args.strategy].shards_parameters:
        return spec.load(ctx)  # stages 1 and 2 shard no parameters
    # "auto" is the file's own dtype: a conversion here would copy the whole model.
    return partition_parameters(spec.load(ctx, dtype="auto"), args, ctx)


def initialize_deepspeed(model: nn.Module, args: Arguments, ctx: DistContext) -> nn.Module:
    """Create the DeepSpeed engine: model and optimizer as the JSON file configures them."""
    import deepspeed

    with quiet(args.verbose):
        engine, _, _, _ = deepspeed.initialize(
            model=model, config=args.ds_config_dict, **optim.for_deepspeed(model, args)
        )
    if args.compile:
        engine.compile()
    return engine


# How each library loads, wraps and trains a model. FSDP shards while it loads and needs no wrapper.
ENGINES = {
    "ddp": Engine(lambda args, ctx, spec: spec.load(ctx), wrap_with_ddp, train_epoch_ddp),
    "fsdp": Engine(shard_with_fsdp, lambda model, args, ctx: model, train_epoch_ddp),
    "deepspeed": Engine(load_for_zero, initialize_deepspeed, train_epoch_deepspeed),
}


def wrap(model: nn.Module, train_data, args: Arguments, ctx: DistContext) -> TrainingObjects:
    """Wrap the model with its engine, and create its optimizer and its loss scaler."""
    strategy = STRATEGIES[args.strategy]
    if args.eval_only and not strategy.shards_parameters:
        # Evaluation on a full replica needs neither a wrapper nor an optimizer.
        model, optimizer = model.to(ctx.device), None
    else:
        model = ENGINES[strategy.engine].wrap(model, args, ctx)
        optimizer = model.optimizer if strategy.uses_deepspeed else optim.create(model, args)
    scaler = loss_scaler(ctx, enabled=ctx.precision == "fp16" and not strategy.uses_deepspeed)
    return TrainingObjects(model, optimizer, scaler, train_data if args.streaming else None)


# =================================================================================== model and data
def load_model_and_tokenizer(
    args: Arguments, ctx: DistContext, spec: models.ModelSpec
) -> tuple[nn.Module, Any]:
    """Load the weights: a full copy per rank, or shards for zero3, infinity and fsdp.

    Returns:
        The model, not yet wrapped by dp or by DeepSpeed, and its tokenizer.
    Raises:
        UserError: the weights or a configuration cannot be used.
    """
    ctx.console.print0("⏳ Loading the model")
    model = ENGINES[STRATEGIES[args.strategy].engine].load(args, ctx, spec)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    dist.barrier()  # all ranks have read the weights before their temporary folder is removed
    if not args.merge_lora:  # --merge_lora reads the weights again at the end
        ctx.temporary.clean_up(spec.weights)
    return model, spec.tokenizer


def prepare_dataset(args: Arguments, ctx: DistContext, tokenizer) -> tuple[Any, Any, dict]:
    """Tokenize the corpus, once per node, and cut it into sequences; a stream is only opened.

    Returns:
        The training sequences, the validation sequences, and the dataset's entry in results.json.
    Raises:
        UserError: the corpus cannot be read, is shorter than one sequence, or lacks the validation
            text that a flag needs.
    """
    ctx.console.print0(f"⏳ Preparing the dataset {args.dataset}")
    open_data = streaming.open_stream if args.streaming else data.open_tokenized
    train_data, validation, facts = open_data(args, ctx, tokenizer)
    data.check_validation(validation, args)
    return train_data, validation, facts


# ================================================================================ the process group
def setup_distributed(args: Arguments, launch: Launch) -> DistContext:
    """Initialize the process group: NCCL for GPUs, gloo for CPU processes.

    A single process also gets a process group, so that there is only one code path.

    Returns:
        This process among the ranks: its device, its output, and the monitor of failures.
    Raises:
        TrainingError: a rank did not arrive in time, or the ranks do not fit together.
        UserError: this rank has no GPU of its own.
    """
    device = choose_device(launch)
    backend = "fake" if args.simulate_gpus else "nccl" if device.type == "cuda" else "gloo"
    console = Console(launch.is_main, args.quiet, args.verbose)
    if gpu := unused_gpu():
        console.warn(f"{gpu} are not supported: training on the CPU.")
    ctx = DistContext.create(launch, device, backend, console)
    dist.init_process_group(
        store=connect_ranks(ctx, args.ddp_timeout, args.hang_seconds),
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timedelta(seconds=args.ddp_timeout),
        **group_options(args, ctx),
    )
    ctx.nodes = sum(ctx.all_gather(launch.is_node_leader))  # one leader per node
    torch.set_float32_matmul_precision("high")  # use TF32 tensor cores for fp32 where available
    # Not warn_only: the backward pass of attention on a GPU would not be deterministic then.
    torch.use_deterministic_algorithms(args.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # no result depends on it
    return ctx


if __name__ == "__main__":
    main(ARGS, LAUNCH)
