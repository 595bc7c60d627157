#!/usr/bin/env python3
"""Fine-tune a causal language model with data parallelism, DeepSpeed ZeRO or PyTorch FSDP.

    python real_model_example.py                           # a small built-in GPT-2, no network
    python real_model_example.py --model gpt2 --num_samples 100           # one GPU, or the CPU
    torchrun --nproc_per_node=4 real_model_example.py --strategy zero2    # 4 GPUs or CPU processes
    deepspeed --num_gpus=4 real_model_example.py --strategy zero3
    accelerate launch --multi_gpu --num_processes 4 real_model_example.py --strategy fsdp
    srun --ntasks=8 --kill-on-bad-exit=1 python real_model_example.py --strategy zero3   # Slurm

The flag --strategy chooses how the parameters (P), the gradients (G) and the optimizer states (O)
are distributed over the N ranks. What each rank stores, and what the ranks send in a step:

    dp        P    G    O     PyTorch DistributedDataParallel: all-reduce of G in the last backward
    zero1     P    G    O/N   DeepSpeed ZeRO stage 1: all-reduce of G in the last backward; each
                              rank updates P/N; then an all-gather of P
    zero2     P    G/N  O/N   stage 2: as zero1, but each backward reduces G, and a rank keeps G/N
    zero3     P/N  G/N  O/N   stage 3: all-gather of a block's P before its forward and its
                              backward; reduce-scatter of its G; each rank updates its shards
    offload   P    G/N  O/N   zero2 with G and O in host memory, where CPUs update an fp32 copy of P
    infinity  P/N  G/N  O/N   zero3 with P and O on NVMe; G accumulates in host memory
    fsdp      P/N  G/N  O/N   PyTorch FSDP2 (fully_shard): as zero3, but with the reduce-scatter in
                              the last backward only; until then a rank stores the whole G

The last backward is that of the last micro-batch of a step. dp and fsdp store P and G in fp32.
DeepSpeed stores them in the precision of the computation, and O includes an fp32 copy of P.

All strategies train the same model: for the same global batch and without dropout the losses agree
up to rounding, for any number of ranks. Read from the top; compare train_epoch_ddp(), which calls
forward_and_backward(), with train_epoch_deepspeed(): the lines that differ are what DeepSpeed
changes. The flags and their defaults are in distributed_training/settings/. <output_dir> gets
results.json, metrics.jsonl, the checkpoints (--save_every) and the trained model (hf/).
"""

import sys

from distributed_training import entry
from tools.hooks import HOOKS  # --check, --replay, --strategy auto: what tools add to a run

if __name__ == "__main__":
    # Sets environment variables that torch reads when it is imported; stops at an invalid flag.
    SETTINGS, LAUNCH = entry.prepare_process(sys.argv[1:], HOOKS)

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed_training.checkpoints.manager import CheckpointManager
from distributed_training.data import batches
from distributed_training.data.batches import StepBatch
from distributed_training.data.opening import Datasets
from distributed_training.data.sequences import Sequences
from distributed_training.hooks import TrainingLoop
from distributed_training.loss_chunks import IGNORED
from distributed_training.model import prepare
from distributed_training.model.loss import computes_loss
from distributed_training.model.spec import ModelSpec
from distributed_training.optimizers import OPTIMIZERS
from distributed_training.ranks import process_group
from distributed_training.ranks.context import DistContext
from distributed_training.ranks.failures import FailureMonitor
from distributed_training.ranks.launch import Launch
from distributed_training.run.run import Run
from distributed_training.run.run_end import RunEnd
from distributed_training.run.start_log import StartLog
from distributed_training.settings.settings import Settings
from distributed_training.settings.training import TrainingSettings
from distributed_training.strategies import gradients
from distributed_training.strategies.ddp.strategy import DDP
from distributed_training.strategies.deepspeed.strategy import DeepSpeed
from distributed_training.strategies.fsdp.strategy import FSDP
from distributed_training.strategies.objects import TrainingObjects


def main(settings: Settings, launch: Launch) -> None:
    """Run setup_distributed() and train() on this rank; if a rank fails, end all of them."""
    entry.run_on_all_ranks(setup_distributed, train, settings, launch, HOOKS)


def setup_distributed(settings: Settings, launch: Launch, monitor: FailureMonitor) -> DistContext:
    """Choose the device, wait for all ranks, and initialize the process group.

    This process is one rank: a launcher has started one for each GPU, or for a share of the CPU's
    cores. A single process also gets a process group, so that there is only one code path.

    Args:
        launch: rank, local rank and world size, which the launcher has set as environment variables
            (RANK, LOCAL_RANK, WORLD_SIZE; under Slurm SLURM_PROCID and others).
        monitor: ends this process together with the other ranks.
    Raises:
        TrainingError: a rank did not arrive in time, or its versions of the code or the libraries
            differ from those of rank 0.
        UserError: a rank has no GPU of its own, or the ranks have devices of different types.
    """
    checks = settings.command.check  # --check reports a device that cannot be used
    device = process_group.device_of_rank(launch, may_fail=checks)  # cuda:<local rank>, or cpu
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL for GPUs, gloo for CPU processes; in a simulation of ranks, collectives return at once.
    real = "nccl" if device.type == "cuda" else "gloo"
    backend = "fake" if settings.debug.simulate_gpus else real
    # Key-value stores that all ranks share: for our own messages, and for the process group.
    cluster, strategy = settings.cluster, settings.strategy
    store, group_store = process_group.meet_ranks(cluster.ddp_timeout, launch, device, backend)
    # From here on a failure of one rank ends all.
    simulated = backend == "fake"
    ranks = 1 if simulated else launch.world_size  # that exist
    monitor.watch(launch.rank, ranks, store, cluster.hang_seconds)
    # Keyword arguments: the backend, and for some strategies the device.
    options = strategy.group_options(backend, device, launch.world_size)
    dist.init_process_group(
        store=group_store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=cluster.ddp_timeout),
        **options,
    )
    nodes = process_group.compare_software(launch, simulated)
    # TF32, and --precision: auto is bf16 where the device computes it.
    training, model = settings.training, settings.model
    precision = process_group.configure_torch(device, strategy, training, model)
    return DistContext(launch, device, backend, monitor, store, nodes, precision)


def train(settings: Settings, ctx: DistContext) -> nn.Module:
    """Build, resume, train, evaluate, export and report.

    Returns:
        The wrapped model; a DeepSpeed engine must be destroyed before the process ends.
    Raises:
        UserError: an argument, the data, the model or the checkpoint to resume cannot be used.
        TrainingError, Preempted: the run failed; or it was stopped by a signal, and has saved.
    """
    training = settings.training
    log = StartLog.open(settings, ctx)  # creates and locks <output_dir>, writes results.json
    end = RunEnd.plan(settings, ctx, log.folder)  # where the trained model goes
    checkpoint = None
    if settings.output.resume is not None:
        from distributed_training.checkpoints.find import find_checkpoint

        checkpoint = find_checkpoint(settings.output, settings.data, training, ctx, log.folder.path)
    spec = ModelSpec.find(settings, ctx)  # configuration and tokenizer; the weights come later
    plan = log.plan_memory(settings, spec, HOOKS.plan_run)  # advice if memory runs out
    log.model_found(settings.model.model, spec, settings.parallelism.strategy, training)
    # Tokens, cut into sequences: before the weights, because its errors come early. Which rank
    # trains on which sequences is decided in split_over_ranks.
    datasets = Datasets.open(settings, ctx, spec.tokenizer, spec.seq_length)
    log.dataset_ready(datasets, training)
    end.check_prompts(spec, datasets.facts)
    objects = build(settings, ctx, spec, log)
    log.wrapped(training.optim, objects.optimizer)
    checkpoints = log.folder.checkpoints(settings.output.keep_last)
    manager = CheckpointManager.create(settings, ctx, checkpoints, objects, spec, datasets)
    counters = manager.resume(checkpoint)  # loads weights, optimizer states; in a new run all 0
    state = batches.train_state(counters, datasets.train, training, ctx, plan.rank_limits(ctx))
    if log.folder.was_complete_at(state):  # --resume of a completed run
        end.repeat(manager, state.step, autocast(objects, ctx))
        return objects.model
    run = Run.open(settings, datasets, log, manager, state, HOOKS.create_balancer)
    # All checks have passed: only now may files of an earlier run be changed.
    run.begin(training, plan, ctx)
    if (step := settings.command.replay) and HOOKS.replay:  # repeats steps, in a temporary folder
        train_epoch = ENGINES[objects.strategy.engine].train_epoch
        remaining = partial(rest_of_epoch, run, training, ctx)  # the steps of this epoch
        loop = TrainingLoop(training, train_epoch, remaining, autocast(objects, ctx))
        return HOOKS.replay.show(run, step, loop, settings.data, ctx)
    eval_loss = train_and_evaluate(run, training, ctx)
    # Writes results.json, and the trained model to <output_dir>/hf: rank 0 gathers one parameter
    # after the other. --generate needs autocast.
    end.finish(run, plan, eval_loss, autocast(objects, ctx))
    return objects.model


def build(settings: Settings, ctx: DistContext, spec: ModelSpec, log: StartLog) -> TrainingObjects:
    """Load the model, shard or wrap it for its strategy, and create the optimizer."""
    # The row of --strategy, with its options. One rank has nothing to shard: zero3 then trains as
    # zero2 does, without hooks around each block.
    strategy = settings.strategy.on_ranks(ctx.world_size)
    if settings.training.eval_only and strategy.whole_parameters:
        return build_replicas(settings, ctx, spec, log)
    log.strategy_chosen(settings.strategy, strategy)
    # ENGINES, below the build functions: for each engine its build function and training loop.
    return ENGINES[strategy.engine].build(strategy, settings, ctx, spec, log)


def train_and_evaluate(run: Run, training: TrainingSettings, ctx: DistContext) -> float | None:
    """Evaluate if it is due, end if all steps are done, train until the next evaluation; repeat.

    Returns:
        The loss of the last evaluation, or None if there was none.
    """
    run.announce(ctx, training.eval_only)
    validation = run.datasets.validation
    state = run.state  # the counters: step, samples, epoch, position (the sequences used in it)
    train_epoch = ENGINES[run.objects.strategy.engine].train_epoch
    # The evaluation comes first in the loop, because the checkpoint of a step is saved before its
    # evaluation: after a resume that may be missing.
    due = training.eval_first if state.step == 0 else state.evaluation_is_due
    due = due or training.eval_only
    eval_loss = None
    while True:
        if due and validation.num_sequences:
            run.log.start_evaluation()
            rank_counts = state.evaluation_counts(training.eval_batch_size or training.batch_size)
            eval_loss = evaluate(run.objects, validation, rank_counts, ctx)
            if eval_loss is None:  # a rank received a stop signal
                run.stop()  # saves a checkpoint and raises Preempted
            state.add_evaluation(eval_loss)  # early stopping may end the run
            run.log.log_evaluation(eval_loss)
            run.manager.after_evaluation(state)
            run.generate(autocast(run.objects, ctx), ctx)  # --generate_every_eval
        elif due:
            run.log.say_nothing_to_evaluate()
        if state.finished:  # all steps done, or stopped early; --eval_only has 0 steps
            return eval_loss
        steps = run.without_skipped(training.skip_steps, rest_of_epoch(run, training, ctx))
        train_epoch(run, steps, training, ctx)
        due = state.evaluation_is_due


# ========================================================================= the two training loops
def train_epoch_ddp(
    run: Run, steps: Iterable[StepBatch], training: TrainingSettings, ctx: DistContext
) -> None:
    """Train in plain PyTorch (dp, fsdp) until the epoch ends or an evaluation is due."""
    objects, state = run.objects, run.state
    model, optimizer, scaler = objects.model, objects.optimizer, objects.scaler
    compute = objects.graphs or partial(forward_and_backward, objects, ctx)  # --cuda_graph, or not
    model.train()
    run.log.start_epoch()
    for step_batch in steps:  # this rank's share of each global batch
        lr = learning_rate(state.step, state.total_steps, training)
        set_learning_rate(optimizer, lr)
        valid_tokens, all_tokens, stop_requests = count_tokens(step_batch, ctx)
        factor = scaler.scale(torch.full((), float(ctx.world_size), device=ctx.device))
        step_loss = torch.zeros((), device=ctx.device)
        run.meter.mark("data")  # the meter only measures: mark(name) ends a phase of the step

        for micro_step, micro_batch in enumerate(step_batch.micro_batches):
            is_last = micro_step + 1 == len(step_batch.micro_batches)
            batches.seed_dropout(training.seed, state.step, micro_step, ctx.rank)
            set_gradient_sync(model, is_last)  # the ranks reduce the gradients once per step
            # Adds the gradients of the micro-batch to those of the step.
            step_loss += compute(micro_batch, valid_tokens, factor, run.meter.mark)

        dist.all_reduce(step_loss)  # the sum over the ranks is the mean over all valid tokens
        run.meter.after_backward()  # counts the memory
        ctx.stop.defer(run.manager.may_save)  # from the first step on a signal lets the run save
        scaler.unscale_(optimizer)  # fp16 only: otherwise the scaler is disabled
        grad_norm = gradients.gradient_norm(model)  # of the whole gradient, also if it is sharded
        if training.max_grad_norm:
            nn.utils.clip_grads_with_norm_(model.parameters(), training.max_grad_norm, grad_norm)
        # A non-finite loss (or norm, except in fp16) disables all further updates; log_step raises.
        gradients.block_update_if_not_finite(objects, step_loss, grad_norm, ctx.simulated)
        scaler.step(optimizer)  # the update; in fp16 all ranks skip it if a gradient overflowed
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.meter.mark("update")

        state.advance()  # step += 1, samples += the sequences of the global batch
        # A line of metrics.jsonl: step, epoch, loss, lr, grad_norm, tokens_per_second, seconds.
        run.log.log_step(step_loss, lr, grad_norm, all_tokens)
        if save_or_stop(run, stop_requests):
            break


def forward_and_backward(
    objects: TrainingObjects, ctx: DistContext, micro_batch, valid_tokens, factor, mark
) -> torch.Tensor:
    """Add the gradients of a micro-batch to those of the step; return its part of the loss."""
    inputs, labels, positions = micro_batch
    with autocast(objects, ctx):
        # Sum of the losses of these tokens / valid tokens of all ranks and micro-batches.
        loss = next_token_loss(objects.model, inputs, labels, valid_tokens, positions, factor)
    mark("forward")
    # DDP and FSDP average the gradients over the ranks; the factor makes it the sum.
    (loss * factor).backward()
    mark("backward")
    return loss.detach()


def train_epoch_deepspeed(
    run: Run, steps: Iterable[StepBatch], training: TrainingSettings, ctx: DistContext
) -> None:
    """Train with DeepSpeed's engine until the epoch ends or an evaluation is due."""
    objects, state = run.objects, run.state
    engine, optimizer = objects.model, objects.optimizer  # the engine scales the loss in fp16
    engine.train()
    run.log.start_epoch()
    for step_batch in steps:
        lr = learning_rate(state.step, state.total_steps, training)
        set_learning_rate(optimizer, lr)
        valid_tokens, all_tokens, stop_requests = count_tokens(step_batch, ctx)
        # As in train_epoch_ddp. The engine will multiply the loss by the scale itself.
        factor = torch.full((), ctx.world_size * objects.loss_scale, device=ctx.device)
        step_loss = torch.zeros((), device=ctx.device)
        run.meter.mark("data")

        for micro_step, (inputs, labels, positions) in enumerate(step_batch.micro_batches):
            is_last = micro_step + 1 == len(step_batch.micro_batches)
            batches.seed_dropout(training.seed, state.step, micro_step, ctx.rank)
            # zero1 reduces the gradients in the last micro-batch only, the others in every one.
            # DeepSpeed would count to a fixed number, but the last step of an epoch may be short.
            engine.set_gradient_accumulation_boundary(is_last)
            loss = next_token_loss(engine, inputs, labels, valid_tokens, positions, factor)
            run.meter.mark("forward")
            # world_size is the factor of dp. valid_tokens covers all micro-batches, so the engine
            # must not divide by their number (scale_wrt_gas). It scales the loss itself in fp16.
            engine.backward(loss * ctx.world_size, scale_wrt_gas=False)
            run.meter.mark("backward")
            step_loss += loss.detach()

        dist.all_reduce(step_loss)
        run.meter.after_backward()
        ctx.stop.defer(run.manager.may_save)
        # As in train_epoch_ddp, but the engine computes the norm inside of its step.
        gradients.block_update_if_not_finite(objects, step_loss, None, ctx.simulated)
        # Norm, clipping, update of this rank's part, all-gather of P (stages 1, 2); clears G.
        engine.step()
        grad_norm = engine.get_global_grad_norm()  # before clipping
        run.meter.mark("update")

        state.advance()
        run.log.log_step(step_loss, lr, grad_norm, all_tokens)
        if save_or_stop(run, stop_requests):
            break


# ================================================================================ parts of a step
def learning_rate(step: int, total_steps: int, training: TrainingSettings) -> float:
    """Return the learning rate of a step: linear warm-up to --lr, then the decay of --lr_scheduler.

    `step` counts from 0. The decay reaches --min_lr_ratio × --lr at the step `total_steps`.
    """
    warmup_steps = training.warmup_steps or math.ceil(training.warmup_ratio * total_steps)
    if step < warmup_steps:
        return training.lr * (step + 1) / (warmup_steps + 1)
    decay_steps, kind = total_steps - warmup_steps, training.lr_scheduler
    if kind == "wsd":  # warm-up, a stable part, and the decay in the last steps
        decay_steps = min(decay_steps, math.ceil(training.decay_ratio * total_steps))
        kind = training.decay_type
    progress = max(0, step - total_steps + decay_steps) / max(1, decay_steps)  # 0 to 1
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "1-sqrt": 1 - math.sqrt(progress),
    }
    return training.lr * (training.min_lr_ratio + (1 - training.min_lr_ratio) * factors[kind])


def set_learning_rate(optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups of PyTorch's or DeepSpeed's optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def rest_of_epoch(run: Run, training: TrainingSettings, ctx: DistContext) -> Iterable[StepBatch]:
    """Return this rank's step batches on the device, from the epoch's first unused sequence on.

    Their order depends on the seed and the epoch only.
    """
    train, state = run.datasets.train, run.state
    if not isinstance(train, Sequences):  # a stream has its own order
        return train.step_batches(ctx.device)
    order = train.epoch_order(training.seed, state.epoch)[state.position :]
    rank_counts = state.ranks.from_step(state.step + 1)
    own = split_over_ranks(train, order, rank_counts, training.gradient_accumulation_steps, ctx)
    return batches.copy_ahead(own, ctx.device)  # copies the next batch while a GPU computes


def split_over_ranks(
    sequences: Sequences,
    order: np.ndarray,
    rank_counts: Iterable[list[int]],
    accumulation: int,
    ctx: DistContext,
) -> Iterator[StepBatch]:
    """Yield this rank's micro-batches of each optimizer step.

    The order is cut into global batches of batch_size × world_size × accumulation sequences.
    Example, 2 × 2 × 2 = 8: rank 0 computes 0 1 in its first micro-batch and 4 5 in its second, rank
    1 computes 2 3 and 6 7. For the same global batch the number of ranks decides only which rank
    computes a sequence. For the collectives every rank must run the same number of micro-batches;
    short ones are filled up with rows without a loss.

    Args:
        rank_counts: for each step, the sequences of each rank in a micro-batch, which are all
            batch_size without --rank_shares.
    """
    position = 0
    for counts in rank_counts:  # for example [2, 2]; without end
        if position >= len(order):
            return
        all_ranks = sum(counts)
        global_batch = order[position : position + all_ranks * accumulation]
        position += len(global_batch)
        own = [
            share_of_rank(global_batch[first : first + all_ranks], counts, ctx.rank)
            for first in range(0, len(global_batch), all_ranks)
        ]
        yield StepBatch(
            [batches.fill_up(sequences, share, counts[ctx.rank]) for share in own],
            tokens=sum(map(sequences.tokens, own)),
            numbers=own,
        )


def share_of_rank(indices: np.ndarray, counts: list[int], rank: int) -> np.ndarray:
    """Return the sequences of one rank, of those that all ranks compute in a micro-batch.

    With --rank_shares 3,1 and 4 sequences rank 0 computes 0 1 2, and rank 1 computes 3.

    Args:
        counts: the sequences of each rank in a whole micro-batch; the last one may be short.
    """
    if len({*counts}) == 1:  # the usual case
        return np.array_split(indices, len(counts))[rank]
    return batches.divide_over_ranks(indices, counts)[rank]


def count_tokens(step_batch: StepBatch, ctx: DistContext) -> torch.Tensor:
    """Count tokens and stop requests of an optimizer step over all ranks, in one all-reduce.

    The loss is divided by the valid tokens of the whole step. Sequences may have different numbers
    of them, so a mean over micro-batches or ranks would weight their tokens differently.

    Returns:
        fp32 [3] on the device (exact up to 2^24), which unpacks into scalar tensors: valid tokens
        (those with a loss), all tokens without padding, ranks that received a stop signal.
    """
    counts = torch.zeros(3, device=ctx.device)
    for _, labels, _ in step_batch.micro_batches:
        counts[0] += (labels[:, 1:] != IGNORED).sum()  # the first token is not predicted
    counts[1].fill_(step_batch.tokens)
    counts[2].fill_(bool(ctx.stop.requested))
    dist.all_reduce(counts)
    return counts


def next_token_loss(
    model: nn.Module, inputs, labels, valid_tokens, positions=None, factor=None
) -> torch.Tensor:
    """Run the forward pass; return the sum of the next-token cross entropies / `valid_tokens`.

    The call of `model` runs the hooks of DDP, FSDP or the engine; those of FSDP and ZeRO-3 gather
    parameters. The inputs, labels and positions are those of a micro-batch, see StepBatch. In fp16
    small gradients would become 0 without the `factor` that the loss is multiplied by.
    """
    # Shift the labels, not the logits: this saves a copy of the largest tensor of the step.
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # position i predicts token i + 1
    options = {} if positions is None else {"position_ids": positions}
    if computes_loss(model):
        # The usual case. spec.load() has replaced the output layer by one that computes the same
        # loss as the code below, but does not store all logits, the largest tensor of a step:
        # add_loss and ChunkedLoss in model/loss.py. The number of tokens is an integer,
        # because FSDP would convert a float to bf16.
        options |= {"tokens": valid_tokens.long(), "factor": factor}
        return model(inputs, targets=targets, **options)
    # Models whose output layer scales or caps its logits, or has adapters.
    logits = model(input_ids=inputs, use_cache=False, **options).logits.flatten(0, 1).float()
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss / valid_tokens


def autocast(objects: TrainingObjects, ctx: DistContext) -> torch.autocast:
    """Return autocast for fp32 weights; DeepSpeed, and FSDP in bf16, convert weights themselves."""
    enabled = ctx.precision in objects.strategy.autocast_precisions
    return torch.autocast(ctx.device.type, ctx.dtype, enabled=enabled)


def set_gradient_sync(model: nn.Module, needed: bool) -> None:
    """Choose, before the forward pass, whether the backward pass reduces the gradients.

    Only the last micro-batch of a step needs it. Until then FSDP stores whole gradients.
    """
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP
        model.set_requires_gradient_sync(needed)
    elif isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = needed  # as model.no_sync() does


def save_or_stop(run: Run, stop_requests: torch.Tensor) -> bool:
    """Save a checkpoint if one is due; return True if an evaluation is due or the run finished.

    Each rank copies its part of the weights and optimizer states, which a thread writes during the
    next steps; rank 0 adds the loss scale, the counters of `state` and, with --streaming, the
    position in the stream. Learning rate, dropout and, without --streaming, the order of the data
    follow from the flags and the counters. If a rank received a stop signal (`stop_requests` counts
    them), the run saves, waits until the checkpoint is on disk, and ends.
    """
    run.balance.after_step()  # --rank_shares auto: may change the shares of the ranks
    run.manager.check_saving()  # raises the error of an earlier save, of a full disk for example
    if run.manager.is_due(run.state):  # --save_every, --save_epochs
        run.log.flush()  # completes the counters
        run.manager.save(run.state)  # every rank calls it
        run.meter.pause()  # no step includes the time of a save
    # On a GPU this reads the count of the previous step, so that the host does not wait.
    if run.manager.stop_requested(stop_requests):
        run.stop()  # saves a checkpoint and raises Preempted
    return run.state.evaluation_is_due or run.state.finished


# ==================================================================================== evaluation
@torch.no_grad()
def evaluate(
    objects: TrainingObjects, validation: Sequences, counts: list[int], ctx: DistContext
) -> float | None:
    """Compute the mean loss over the validation tokens, each of which counts exactly once.

    Args:
        counts: the sequences of each rank in a batch.
    Returns:
        The loss in nats per token, or None if a rank received a stop signal.
    """
    model = objects.model
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)  # loss, tokens
    divisor = torch.ones((), device=ctx.device)  # the whole sum is divided at the end
    order = np.arange(validation.num_sequences)
    split = split_over_ranks(validation, order, itertools.repeat(counts), 1, ctx)
    steps = batches.copy_ahead(split, ctx.device)
    steps = batches.with_bar(steps, "Evaluation", len(order), sum(counts))
    for number, step_batch in enumerate(steps):
        # Not for each batch, because this check synchronizes the ranks.
        if number % 8 == 0 and ctx.asked_to_stop():
            return None
        [(inputs, labels, positions)] = step_batch.micro_batches
        with autocast(objects, ctx):
            total[0] += next_token_loss(model, inputs, labels, divisor, positions)
        total[1] += (labels[:, 1:] != IGNORED).sum()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ============================================ strategies: load, shard or wrap, create the optimizer
def build_ddp(
    strategy: DDP, settings: Settings, ctx: DistContext, spec: ModelSpec, log: StartLog
) -> TrainingObjects:
    """Replicate the model on every rank; DDP averages the gradients during the backward pass."""
    model = spec.load(ctx)
    prepare.prepare_forward(model, settings.model, spec)
    log.model_loaded(spec)
    prepare.copy_to_device(model, ctx.device)  # on a CPU: out of the memory-mapped file
    training = settings.training
    groups = parameter_groups(model, training, spec.unused)
    if training.bf16_blocks:  # instead of autocast; the parameters stay in fp32
        strategy.compute_blocks_in_bf16(model)
    if ctx.world_size > 1:  # a single process has nothing to reduce
        model = DistributedDataParallel(
            model,
            device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None,
            # After the reduction the gradients are views of the communication buckets, not a copy.
            gradient_as_bucket_view=True,
            # Buffers (masks, rotary frequencies) are equal on all ranks and never change.
            broadcast_buffers=False,
            # Text gives no gradient to a vision part, for which DDP would wait.
            find_unused_parameters=bool(spec.unused),
        )
        if hook := strategy.communication_hook(ctx.simulated):  # all-reduces in --reduce_dtype
            model.register_comm_hook(None, hook)
    optimizer = create_optimizer(groups, model, training)
    scaler = gradients.loss_scaler(ctx.device, ctx.simulated, enabled=ctx.precision == "fp16")
    objects = TrainingObjects(strategy, model, optimizer, scaler)
    if training.cuda_graph:
        compute = partial(forward_and_backward, objects, ctx)
        objects.graphs = strategy.record_micro_batches(compute, model)
    return objects


def build_fsdp(
    strategy: FSDP, settings: Settings, ctx: DistContext, spec: ModelSpec, log: StartLog
) -> TrainingObjects:
    """Shard parameters, gradients and optimizer states over the ranks, per transformer block.

    The model is created on the meta device (shapes only); rank 0 then broadcasts its weights.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    from distributed_training.strategies.fsdp.shards import fill_from_rank0, layers_to_shard

    options = strategy.options  # --fsdp, --fsdp_config
    full_model = spec.load(ctx, dtype=spec.weights.dtype) if ctx.is_main else None  # on the CPU
    model = spec.on_meta_device(spec.weights.in_4bit)  # --load_in_4bit: shapes of packed weights
    # bf16: gathers and computes in bf16, stores shards in fp32, reduces in fp32 or --reduce_dtype.
    # fp16 is left to autocast, whose 16-bit copies of the weights stay until the backward pass.
    dtype = torch.bfloat16 if ctx.precision == "bf16" else None
    mp_policy = MixedPrecisionPolicy(dtype, reduce_dtype=strategy.torch_reduce_dtype)
    # The mesh of all ranks; HYBRID_SHARD has a second dimension, nodes that hold the same shards.
    fsdp_options: dict[str, Any] = {"mesh": ctx.mesh(options.hybrid), "mp_policy": mp_policy}
    if options.offload:
        fsdp_options["offload_policy"] = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    layers = layers_to_shard(model, options)  # the transformer blocks
    for layer in reversed(layers):  # hooks gather a layer's parameters before it computes
        fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **fsdp_options)
    # The rest (embeddings, last norm, output layer) stays gathered until the backward pass.
    fully_shard(model, **fsdp_options)
    if options.forward_prefetch:
        for layer, next_layer in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([next_layer])
    model.to_empty(device="cpu" if options.offload else ctx.device)
    spec.quantize_from_rank0(model, full_model, ctx.device)  # if they are to be in 4 bits
    fill_from_rank0(model, full_model, ctx.device)  # also buffers
    del full_model
    prepare.prepare_forward(model, settings.model, spec)
    log.model_loaded(spec)
    # The optimizer states are sharded because the parameters are.
    training = settings.training
    optimizer = create_optimizer(parameter_groups(model, training, spec.unused), model, training)
    device = next(model.parameters()).device  # of the gradients: they may be offloaded
    scaler = gradients.loss_scaler(device, ctx.simulated, enabled=ctx.precision == "fp16")
    return TrainingObjects(strategy, model, optimizer, scaler)


def build_deepspeed(
    strategy: DeepSpeed, settings: Settings, ctx: DistContext, spec: ModelSpec, log: StartLog
) -> TrainingObjects:
    """Create the DeepSpeed engine, which owns the optimizer and shards its states.

    Its configuration for zero2 without the sizes of its buckets (<output_dir>/ds_config.json):

        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
         "gradient_clipping": 1.0, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2},
         "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": true, ...}}}

    For zero1 and zero3 "stage" is 1 and 3. offload has stage 2 and "offload_optimizer": {"device":
    "cpu"}; infinity has stage 3 and {"device": "nvme"} for "offload_optimizer" and "offload_param".
    DeepSpeed calls create_optimizer if --optim is not AdamW. The loop sets the learning rate.
    """
    import deepspeed

    from distributed_training.run.prepare_deepspeed import prepare_deepspeed
    from distributed_training.strategies.deepspeed.preparation import hidden_output

    training, verbose = settings.training, settings.debug.verbose
    # Creates the NVMe folder, compiles DeepSpeed's ops, fills in each "auto" of the configuration.
    strategy = prepare_deepspeed(strategy, settings, ctx, spec, log.folder.path)
    if strategy.stage == 3:  # also infinity
        model = partition_with_zero3(strategy, ctx, spec, verbose)
    else:
        model = spec.load(ctx)
    prepare.prepare_forward(model, settings.model, spec)
    log.model_loaded(spec)
    own_optimizer = not (OPTIMIZERS[training.optim].in_ds_config or training.eval_only)
    with hidden_output(verbose):
        # Moves the model to the device, and creates and wraps the optimizer.
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model,
            config=strategy.config,
            model_parameters=parameter_groups(model, training, spec.unused),
            optimizer=partial(create_optimizer, model=model, training=training)
            if own_optimizer
            else None,
        )
    objects = TrainingObjects(strategy, engine, optimizer)  # the engine has its own loss scaler
    if own_optimizer:
        # DeepSpeed has flattened the weights; Muon must know where the matrices are.
        objects.sharded_state(ctx.device).place_masters()
    return objects


def partition_with_zero3(
    strategy: DeepSpeed, ctx: DistContext, spec: ModelSpec, verbose: bool
) -> nn.Module:
    """Load the model and shard each parameter as it is read; infinity moves the shards to NVMe.

    The weight file is memory-mapped. A rank never stores more than its shards and one parameter.
    """
    import deepspeed

    from distributed_training.strategies.deepspeed.preparation import OneByOne, hidden_output

    # "auto" is the file's own dtype: a conversion here would copy the whole model.
    model = spec.load(ctx, dtype="auto")
    strategy.mark_blocks(model)  # the hooks will gather and free a whole block at once
    # Not `with zero.Init()`, which would skip transformers' own initialization of new weights.
    one_by_one = OneByOne(model, ctx.dtype)  # converts a parameter when it is its turn
    with hidden_output(verbose):
        deepspeed.zero.Init(module=one_by_one, config_dict_or_path=strategy.config)
    for buffer in model.buffers():  # DeepSpeed neither shards nor moves them
        buffer.data = buffer.data.to(ctx.device)
    return model


def build_replicas(
    settings: Settings, ctx: DistContext, spec: ModelSpec, log: StartLog
) -> TrainingObjects:
    """For --eval_only: copy the model to every rank, without gradients and an optimizer.

    dp, zero1, zero2 and offload then store the same, as under DDP, and DeepSpeed is not needed.
    """
    model = spec.load(ctx)
    prepare.prepare_forward(model, settings.model, spec)
    log.model_loaded(spec)
    return TrainingObjects(DDP("Replicas for an evaluation"), model.to(ctx.device), optimizer=None)


class Engine(NamedTuple):
    """What the script does with the strategies of one engine."""

    build: Callable[..., TrainingObjects]
    train_epoch: Callable[[Run, Iterable[StepBatch], TrainingSettings, DistContext], None]


ENGINES = {
    "ddp": Engine(build_ddp, train_epoch_ddp),
    "fsdp": Engine(build_fsdp, train_epoch_ddp),
    "deepspeed": Engine(build_deepspeed, train_epoch_deepspeed),
}


# -------------------------------------------------------------------- the same for all strategies
def parameter_groups(
    model: nn.Module, training: TrainingSettings, unused: frozenset[str] = frozenset()
) -> list[dict]:
    """Return two groups: weight decay for matrices and embeddings, none for biases and norms.

    Nor for `unused` parameters: they have no gradient, and only DeepSpeed would decay them.
    """
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    # A parameter that ZeRO-3 has partitioned has the shape [0]; its full shape is in ds_shape.
    is_matrix = {p: len(getattr(p, "ds_shape", p.shape)) >= 2 for p in trained}
    decays = {p: is_matrix[p] and name not in unused for p, name in trained.items()}
    groups = [
        {"params": [p for p in trained if decays[p]], "weight_decay": training.weight_decay},
        {"params": [p for p in trained if not decays[p]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # plain LoRA has no vectors


def create_optimizer(
    groups: list[dict], model: nn.Module, training: TrainingSettings
) -> torch.optim.Optimizer:
    """Return the optimizer of --optim for the parameter groups of a model; AdamW by default."""
    return OPTIMIZERS[training.optim].create(groups, model, training)


if __name__ == "__main__":
    main(SETTINGS, LAUNCH)
