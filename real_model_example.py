#!/usr/bin/env python3
"""Fine-tune a causal language model with data parallelism, DeepSpeed ZeRO or PyTorch FSDP.

    python real_model_example.py                           # a small built-in GPT-2, no network
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

With bf16 or fp16, P of the DeepSpeed strategies has 16 bits and O includes fp32 master weights; dp
and fsdp store P in fp32. With gradient accumulation, fsdp stores a whole G until the last
micro-batch. What the ranks send in a step, besides a few scalars:

    dp           last backward: all-reduce of G
    zero1        last backward: reduction of G; step: each rank updates P/N, then all-gather of P
    zero2        each backward: reduction of G to its owners; step: as zero1 (so does offload)
    zero3, fsdp  all-gather of a layer's P before its forward and backward; reduce-scatter of its G
                 (fsdp: in the last backward); step: each rank updates its shard (so does infinity)

All strategies train the same model: for the same global batch and without dropout the losses agree
up to rounding, for any number of ranks. Read from the top; compare train_epoch_ddp() with
train_epoch_deepspeed(): the lines that differ are what DeepSpeed changes. <output_dir> gets
results.json, metrics.jsonl, the checkpoints (--save_every) and the trained model (hf/).
"""

from __future__ import annotations

import sys

from support import startup

if __name__ == "__main__":
    # Before the imports below, which take seconds: --help and wrong flags are answered at once.
    ARGS, LAUNCH = startup.start(sys.argv[1:])

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from support.checkpoints.manager import CheckpointManager, TrainingObjects
from support.cli.arguments import Arguments
from support.cluster.context import DistContext
from support.data import batches as data
from support.model import resolve as models
from support.model.loss import next_token_loss
from support.report.run import Run
from support.strategies import deepspeed as zero
from support.strategies import fsdp, gradients
from support.tables import STRATEGIES
from support.train_state import TrainState


def train(args: Arguments, ctx: DistContext) -> nn.Module:
    """Load, wrap, resume, train, evaluate, export and report.

    Args:
        args: the flags.
        ctx: this process: its rank, world size, device, precision and stop signal.
    Returns:
        The wrapped model; a DeepSpeed engine must be destroyed before the process ends.
    Raises:
        UserError: an argument, the data, the model or the checkpoint to resume cannot be used.
        TrainingError: the run failed.
        Preempted: a rank received a stop signal, and the checkpoint is complete.
    """
    run = Run.open(args, ctx)  # creates <output_dir>, writes results.json
    checkpoint = CheckpointManager.find(args, ctx, run.folder)  # None without --resume
    spec = models.find_model(args, ctx)  # configuration and tokenizer; the weights come later
    args = args.replace(seq_length=spec.seq_length(args))
    run.announce_model(args, spec)
    # The data is prepared first, so that errors in it are reported before the weights are loaded.
    train_data, validation, dataset = open_dataset(args, ctx, spec.tokenizer)
    if args.ds_config_dict:  # fill in each "auto", and write <output_dir>/ds_config.json
        args = zero.configure(args, ctx, spec, run.folder)
    model = load_model(args, ctx, spec)
    run.model_loaded(args, spec, dataset, train_data)
    objects = wrap(model, train_data, args, ctx)
    run.memory.note("wrapped")

    manager = CheckpointManager(args, ctx, run.folder, objects, spec, dataset)
    # Loads the weights and states; the counters are the step, the epoch, the place in it, …, or 0.
    counters = manager.resume(checkpoint)
    state = data.train_state(counters, train_data, args, ctx.world_size)
    if run.was_complete_at(args, state):  # --resume of a completed run
        run.finish_completed_run(args, manager, state, autocast(objects.model, ctx))
        return objects.model
    run.start_training(args, objects, manager, state)
    eval_loss = train_and_evaluate(objects, (train_data, validation), state, run, args, ctx)
    run.finish(eval_loss, autocast(objects.model, ctx))
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
    """
    train_data, validation = datasets
    uses_deepspeed = STRATEGIES[args.strategy].uses_deepspeed
    train_epoch = train_epoch_deepspeed if uses_deepspeed else train_epoch_ddp
    # A checkpoint is saved before the evaluation of its step: a resumed run may have to begin with
    # that evaluation.
    due = args.eval_first if state.step == 0 else state.evaluation_is_due
    due = due or args.eval_only
    eval_loss = None
    while True:
        if due and validation.num_sequences:
            run.start_evaluation()
            eval_loss = evaluate(objects.model, validation, args, ctx)
            if eval_loss is None:  # a rank received a stop signal
                run.preempt()  # saves a checkpoint and raises Preempted
            state.add_evaluation(eval_loss)  # early stopping may end the run
            run.log_evaluation(eval_loss)
            run.manager.after_evaluation(state)
        elif due:
            run.skip_evaluation()  # prints that there are no validation sequences
        if state.finished:  # with --eval_only there is no step to train
            return eval_loss
        train_epoch(objects, rest_of_epoch(train_data, state, args, ctx), state, run, args, ctx)
        due = state.evaluation_is_due


# ========================================================================= the two training loops
def train_epoch_ddp(
    objects: TrainingObjects,
    batches: Iterable[data.StepBatch],
    state: TrainState,
    run: Run,
    args: Arguments,
    ctx: DistContext,
) -> None:
    """Train the rest of an epoch in plain PyTorch (dp, fsdp), or until an evaluation is due."""
    model, optimizer, scaler = objects.model, objects.optimizer, objects.scaler
    model.train()
    run.start_epoch()
    for step_batch in batches:  # this rank's share of each global batch
        lr = learning_rate(state.step, state.total_steps, args)
        set_learning_rate(optimizer, lr)
        valid_tokens, all_tokens, stop_requests = count_tokens(step_batch, ctx)
        step_loss = torch.zeros((), device=ctx.device)
        run.meter.mark("data")  # the meter only measures: mark(name) ends a phase of the step

        for micro_step, (inputs, labels, positions) in enumerate(step_batch.micro_batches):
            is_last = micro_step + 1 == len(step_batch.micro_batches)
            data.seed_dropout(args.seed, state.step, micro_step, ctx.rank)
            with gradient_sync(model, needed=is_last):  # reduce the gradients once per step
                with autocast(model, ctx):
                    # The sum of the losses of predicting each next token, divided by valid_tokens.
                    loss = next_token_loss(model, inputs, labels, valid_tokens, positions)
                run.meter.mark("forward")
                # DDP and FSDP average the gradients over the ranks. valid_tokens counts the tokens
                # of all ranks, so the factor world_size turns the average into the sum.
                scaler.scale(loss * ctx.world_size).backward()
                run.meter.mark("backward")
            step_loss += loss.detach()

        dist.all_reduce(step_loss)  # the sum over the ranks is the mean over all valid tokens
        run.meter.after_backward()
        scaler.unscale_(optimizer)  # fp16 only: otherwise the scaler is disabled
        grad_norm = gradients.gradient_norm(model)  # over all shards, before clipping
        if args.max_grad_norm:
            nn.utils.clip_grads_with_norm_(model.parameters(), args.max_grad_norm, grad_norm)
        # Non-finite loss (or norm, except in fp16): no more updates, an error at the next log line.
        gradients.check_finite(objects, step_loss, grad_norm, ctx)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        run.meter.mark("update")

        state.advance()
        run.log_step(step_loss, lr, grad_norm, all_tokens)  # to metrics.jsonl at --logging_steps
        if save_or_stop(state, stop_requests, run, args):
            break


def train_epoch_deepspeed(
    objects: TrainingObjects,
    batches: Iterable[data.StepBatch],
    state: TrainState,
    run: Run,
    args: Arguments,
    ctx: DistContext,
) -> None:
    """Train the rest of an epoch with DeepSpeed, or until an evaluation is due."""
    engine, optimizer = objects.model, objects.optimizer  # the engine scales the loss in fp16
    engine.train()
    run.start_epoch()
    for step_batch in batches:
        lr = learning_rate(state.step, state.total_steps, args)
        set_learning_rate(optimizer, lr)
        valid_tokens, all_tokens, stop_requests = count_tokens(step_batch, ctx)
        step_loss = torch.zeros((), device=ctx.device)
        run.meter.mark("data")

        for micro_step, (inputs, labels, positions) in enumerate(step_batch.micro_batches):
            is_last = micro_step + 1 == len(step_batch.micro_batches)
            data.seed_dropout(args.seed, state.step, micro_step, ctx.rank)
            # Tells backward() and step() whether this micro-batch is the last one of the step.
            # DeepSpeed would count to a fixed number, but the last step of an epoch may be short.
            engine.set_gradient_accumulation_boundary(is_last)
            loss = next_token_loss(engine, inputs, labels, valid_tokens, positions)
            run.meter.mark("forward")
            # world_size as in train_epoch_ddp. valid_tokens covers all micro-batches, so the engine
            # must not divide by their number (scale_wrt_gas).
            engine.backward(loss * ctx.world_size, scale_wrt_gas=False)
            run.meter.mark("backward")
            step_loss += loss.detach()

        dist.all_reduce(step_loss)
        run.meter.after_backward()
        gradients.check_finite(objects, step_loss, None, ctx)  # the loss: step() computes the norm
        engine.step()  # clips, updates this rank's part of the weights, all-gathers, clears G
        grad_norm = engine.get_global_grad_norm()
        run.meter.mark("update")

        state.advance()
        run.log_step(step_loss, lr, grad_norm, all_tokens)
        if save_or_stop(state, stop_requests, run, args):
            break


# ================================================================================ parts of a step
def learning_rate(step: int, total_steps: int, args: Arguments) -> float:
    """Return the learning rate of a step: linear warm-up to --lr, then --lr_scheduler.

    Args:
        step: the optimizer step, counted from 0.
        total_steps: the step at which "linear" and "cosine" reach 0.
    """
    warmup_steps = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    if step < warmup_steps:
        return args.lr * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
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


def rest_of_epoch(
    train_data: Any, state: TrainState, args: Arguments, ctx: DistContext
) -> Iterable[data.StepBatch]:
    """Return this rank's step batches for the rest of the epoch, on the device.

    Their order depends on the seed and the epoch only. A resumed run skips what it has seen.
    """
    if args.streaming:
        return train_data.step_batches(ctx.device)
    order = train_data.epoch_order(args.seed, state.epoch)[state.position :]
    accumulation = args.gradient_accumulation_steps
    batches = split_over_ranks(train_data, order, args.batch_size, accumulation, ctx)
    return data.copy_ahead(batches, ctx.device)  # copies the next batch while a GPU computes


def split_over_ranks(
    sequences: Any, order: np.ndarray, batch_size: int, accumulation: int, ctx: DistContext
) -> Iterator[data.StepBatch]:
    """Yield this rank's micro-batches of each optimizer step.

    The order is cut into global batches of batch_size × world_size × accumulation sequences. With
    2 × 2 × 2, rank 0 takes the sequences 0 1 and 4 5 of the order in its two micro-batches, rank 1
    takes 2 3 and 6 7. For the same global batch, the number of ranks changes only which rank
    computes a sequence, not the step that uses it. Every micro-batch has batch_size rows on every
    rank; missing sequences become rows whose labels are all ignored.

    Yields:
        A StepBatch, whose micro-batches are (inputs, labels, positions), each int64
        [batch_size, length]. The positions restart at each document or example; None if they need
        not.
    """
    all_ranks = batch_size * ctx.world_size  # sequences of a micro-batch on all ranks
    for start in range(0, len(order), all_ranks * accumulation):
        global_batch = order[start : start + all_ranks * accumulation]
        shares = [
            np.array_split(global_batch[offset : offset + all_ranks], ctx.world_size)
            for offset in range(0, len(global_batch), all_ranks)
        ]
        yield data.StepBatch(
            [data.fill_up(sequences, share[ctx.rank], batch_size) for share in shares],
            tokens=sum(sequences.tokens(share[ctx.rank]) for share in shares),
        )


def count_tokens(step_batch: data.StepBatch, ctx: DistContext) -> torch.Tensor:
    """Count the tokens of one optimizer step over all micro-batches and ranks, in one all-reduce.

    The loss is divided by the valid tokens of the whole step. Sequences may have different numbers
    of them, so a mean over micro-batches or ranks would weight their tokens differently.

    Returns:
        fp32 [3] on the device, which unpacks into scalar tensors: valid tokens (those with a loss),
        all tokens without padding, and the number of ranks that received a stop signal.
    """
    counts = torch.zeros(3, device=ctx.device)
    for _, labels, _ in step_batch.micro_batches:
        counts[0] += (labels[:, 1:] != data.IGNORED).sum()  # nothing predicts the first token
    counts[1].fill_(step_batch.tokens)
    counts[2].fill_(bool(ctx.stop.requested))
    dist.all_reduce(counts)
    return counts


def autocast(model: nn.Module, ctx: DistContext) -> torch.autocast:
    """Return the autocast context for 16-bit computation with fp32 weights.

    DeepSpeed's engine, and in bf16 FSDP2's mixed-precision policy, convert the weights themselves.
    """
    is_engine = hasattr(model, "set_gradient_accumulation_boundary")
    converted = is_engine or (fsdp.is_fsdp_module(model) and ctx.precision == "bf16")
    enabled = ctx.precision != "fp32" and not converted
    return torch.autocast(ctx.device.type, ctx.dtype, enabled=enabled)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, needed: bool) -> Iterator[None]:
    """Reduce the gradients over the ranks in this backward pass only if `needed`.

    Only the last micro-batch of a step needs it. Until then FSDP stores whole gradients.
    """
    if fsdp.is_fsdp_module(model):
        model.set_requires_gradient_sync(needed)
    skip_ddp_sync = isinstance(model, DistributedDataParallel) and not needed
    with model.no_sync() if skip_ddp_sync else contextlib.nullcontext():
        yield


def save_or_stop(state: TrainState, stop_requests: torch.Tensor, run: Run, args: Arguments) -> bool:
    """Save a checkpoint if one is due; return whether to leave this loop, to evaluate or to end.

    A checkpoint contains the weights, the optimizer's states, the loss scaler, the counters of
    `state` and, with --streaming, the position in the stream. Dropout and the order of data that is
    not streamed follow from --seed and the counters.

    Args:
        stop_requests: number of ranks that received a stop signal. Then the run saves and ends.
    """
    every_steps = args.save_every and state.step % args.save_every == 0
    if every_steps or (args.save_epochs and state.at_end_of_epoch):
        run.save()
    if run.manager.stop_requested(stop_requests):  # on a GPU, those of the previous step
        run.preempt()  # saves a checkpoint and raises Preempted
    return state.evaluation_is_due or state.finished


# =========================================================================== evaluation and data
@torch.no_grad()
def evaluate(model: nn.Module, validation: Any, args: Arguments, ctx: DistContext) -> float | None:
    """Compute the mean loss over the validation tokens.

    The ranks share the sequences as in training, so every token counts exactly once.

    Returns:
        The loss in nats per token, or None if a rank received a stop signal.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)  # loss, tokens
    one = torch.ones((), device=ctx.device)  # the divisor, so that the losses are only summed
    validation = validation.take(args.eval_samples or args.num_samples or validation.num_sequences)
    order = np.arange(validation.num_sequences)
    batch_size = args.eval_batch_size or args.batch_size
    steps = data.copy_ahead(split_over_ranks(validation, order, batch_size, 1, ctx), ctx.device)
    count = data.steps_of(len(order), batch_size * ctx.world_size)
    for number, step_batch in enumerate(data.with_bar(steps, "Evaluation", count)):
        # Not for each batch, because this check synchronizes the ranks.
        if number % 8 == 0 and ctx.asked_to_stop():
            return None
        [(inputs, labels, positions)] = step_batch.micro_batches
        with autocast(model, ctx):
            total[0] += next_token_loss(model, inputs, labels, one, positions)
        total[1] += (labels[:, 1:] != data.IGNORED).sum()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def open_dataset(args: Arguments, ctx: DistContext, tokenizer) -> tuple[Any, Any, dict]:
    """Tokenize the corpus, once per node, and cut it into sequences; a stream is only opened.

    Returns:
        The training sequences, the validation sequences, and the dataset's entry in results.json.
    """
    if args.streaming:
        from support.data.streaming import open_stream

        opened: tuple[Any, Any, dict] = open_stream(args, ctx, tokenizer)
    else:
        opened = data.open_tokenized(args, ctx, tokenizer)
    train_data, validation, facts = opened
    data.check_validation(validation, args)
    return train_data, validation, facts


# ================================================================ strategies: load, wrap, optimizer
def load_model(args: Arguments, ctx: DistContext, spec: models.ModelSpec) -> nn.Module:
    """Load the weights: a full copy per rank, or shards for zero3, infinity and fsdp."""
    strategy = STRATEGIES[args.strategy]
    if strategy.engine == "fsdp":
        model = shard_with_fsdp(args, ctx, spec)
    elif strategy.shards_parameters:
        model = partition_with_zero3(args, ctx, spec)
    else:
        model = spec.load(ctx)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # All ranks have read the weights before the temporary folder of random weights is removed.
    dist.barrier()
    if not args.merge_lora:  # --merge_lora reads the weights again at the end
        spec.remove_drawn_weights()
    return model


def wrap(model: nn.Module, train_data: Any, args: Arguments, ctx: DistContext) -> TrainingObjects:
    """Wrap the model for its strategy, and create its optimizer and its loss scaler."""
    strategy = STRATEGIES[args.strategy]
    optimizer = None
    if args.eval_only and not strategy.shards_parameters:
        model.to(ctx.device)  # a full copy needs neither a wrapper nor an optimizer
    elif strategy.uses_deepspeed:
        model = initialize_deepspeed(model, args)
        optimizer = model.optimizer
    else:
        if strategy.engine == "ddp":
            model = wrap_with_ddp(model, args, ctx)
        optimizer = create_optimizer(parameter_groups(model, args), args)
    scaling = ctx.precision == "fp16" and not strategy.uses_deepspeed
    scaler = gradients.loss_scaler(ctx, enabled=scaling)
    stream = train_data if args.streaming else None
    # True from the first non-finite loss or gradient norm on; the host does not wait to read it.
    found_inf = torch.zeros((), dtype=torch.bool, device=ctx.device)
    return TrainingObjects(model, optimizer, scaler, stream, found_inf)


def parameter_groups(model: nn.Module, args: Arguments) -> list[dict]:
    """Return two groups: weight decay for matrices and embeddings, none for biases and norms."""

    def is_matrix(parameter: nn.Parameter) -> bool:
        # A parameter that ZeRO-3 has partitioned has an empty shape; its full shape is in ds_shape.
        return len(getattr(parameter, "ds_shape", parameter.shape)) >= 2

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if is_matrix(p)], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if not is_matrix(p)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]  # LoRA adapters are all matrices


def create_optimizer(groups: list[dict], args: Arguments) -> torch.optim.Optimizer:
    """Return the optimizer of --optim."""
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, **adam, fused=True)
    if args.optim == "sgd":
        # The fused kernel does not support FSDP2's sharded tensors.
        return torch.optim.SGD(groups, lr=args.lr, fused=args.strategy != "fsdp")
    if args.optim == "adafactor":
        from transformers.optimization import Adafactor

        # As Trainer configures it: --lr is the step size, as with the other optimizers.
        return Adafactor(groups, lr=args.lr, scale_parameter=False, relative_step=False)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, lr=args.lr, **adam)


# --------------------------------------------------------------------------- PyTorch DDP (dp)
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


# ------------------------------------------------------------------------ PyTorch FSDP2 (fsdp)
def shard_with_fsdp(args: Arguments, ctx: DistContext, spec: models.ModelSpec) -> nn.Module:
    """Shard parameters, gradients and optimizer states over the ranks, per transformer block.

    The sharded model is built without memory; then rank 0's weights are broadcast one by one.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    full_model = spec.load(ctx) if ctx.is_main else None
    sharded = spec.on_meta_device()
    # bf16: computes in bf16, keeps the shards and reduces in fp32. fp16 is left to autocast.
    dtype = torch.bfloat16 if ctx.precision == "bf16" else None
    on_cpu = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda")
    options = {
        "mesh": ctx.mesh(args.fsdp.hybrid),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        "offload_policy": on_cpu if args.fsdp.offload else OffloadPolicy(),
    }
    blocks = fsdp.blocks_to_shard(sharded, args.fsdp)
    for block in blocks:
        if args.compile:
            block.compile()
        fully_shard(block, reshard_after_forward=args.fsdp.reshard_after_forward, **options)
    fully_shard(sharded, **options)  # the rest; it stays gathered from forward to backward
    if args.fsdp.forward_prefetch:
        for block, next_block in itertools.pairwise(blocks):
            block.set_modules_to_forward_prefetch([next_block])
    if args.compile:
        sharded.get_output_embeddings().compile()  # the output layer, which computes the loss
    sharded.to_empty(device="cpu" if args.fsdp.offload else ctx.device)
    fsdp.fill_from_rank0(sharded, full_model, ctx)
    return sharded


# -------------------------------------- DeepSpeed (zero1, zero2, zero3, offload, infinity)
def partition_with_zero3(args: Arguments, ctx: DistContext, spec: models.ModelSpec) -> nn.Module:
    """Load the model and shard each parameter as it is read; infinity moves the shards to NVMe.

    The weight file is memory-mapped. A rank never stores more than its shards and one parameter.
    """
    # "auto" is the file's own dtype: a conversion here would copy the whole model.
    return zero.partition_parameters(spec.load(ctx, dtype="auto"), args, ctx)


def initialize_deepspeed(model: nn.Module, args: Arguments) -> nn.Module:
    """Create the DeepSpeed engine, which owns the optimizer and shards its states.

    Its configuration, <output_dir>/ds_config.json, describes AdamW; DeepSpeed calls
    create_optimizer for the others.
    """
    import deepspeed

    use_ours = args.optim != "adamw" and not args.eval_only
    with zero.quiet(args.verbose):
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            config=args.ds_config_dict,
            model_parameters=parameter_groups(model, args),
            optimizer=partial(create_optimizer, args=args) if use_ours else None,
        )
    if args.compile:
        engine.compile()
    return engine


if __name__ == "__main__":
    # Initializes the process group, calls train(ARGS, ctx), and ends all ranks together.
    startup.run_on_all_ranks(train, ARGS, LAUNCH)
