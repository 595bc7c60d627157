"""The conclusions of a comparison in sentences: same model, fastest, smallest, and what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from support.report.compare import Comparison, Row, volumes
from support.units import human_bytes, human_rate


def verdict(comparison: Comparison) -> list[str]:
    """Return the conclusions of the comparison, one or more sentences each."""
    reference = comparison.reference
    if reference is None:
        return ["❌ No strategy completed, so there is nothing to compare."]
    if comparison.simulated:
        return [*_simulated(comparison), *_incomplete(comparison)]
    sentences = [
        *_departing(comparison, reference),
        *_same_model(comparison, reference),
        *_control(comparison, reference),
    ]
    rows = [row for row in comparison.rows if row.completed and row.departs_at is None]
    if rows:
        sentences += [
            _fastest(comparison, rows),
            _smallest(comparison, reference, rows),
            *_limits(comparison, rows),
        ]
    return [*sentences, *_incomplete(comparison)]


def _simulated(comparison: Comparison) -> Iterator[str]:
    """Explain memory simulations, and compare the memory estimate with them."""
    ranks = comparison.work["simulated_world_size"]
    yield (
        f"This is a memory simulation: one process allocated what rank 0 of {ranks} ranks would. "
        "Nothing was trained, so there are no losses and no speeds. "
        "The sizes in the table are in MB (2^20 bytes)."
    )
    errors = [
        (abs(row.planned_bytes / row.memory_bytes - 1), row.strategy)
        for row in comparison.rows
        if row.completed and row.planned_bytes
    ]
    if errors:
        error, worst = max(errors, key=lambda pair: pair[0])
        quantity = "peaks" if comparison.on_gpu else "model states"
        yield (
            f"The planned {quantity} differ from the simulated ones by at most "
            f"{100 * error:.1f}% ({worst})."
        )


def _tolerance_text(comparison: Comparison) -> str:
    return f"tolerance {comparison.tolerance:g} for {comparison.work['precision']}"


def _median_text(comparison: Comparison) -> str:
    return f" in medians of {comparison.lasting} steps" if comparison.lasting > 1 else ""


def _departing(comparison: Comparison, reference: Row) -> Iterator[str]:
    """Name the reference if it is not dp, and the strategies that train another model."""
    if reference.strategy != "dp":
        dp = next((row for row in comparison.rows if row.strategy == "dp"), None)
        reason = f"did not complete ({dp.status})" if dp else "was left out"
        yield (
            f"ℹ️  dp, the plain reference, {reason}: the others are compared with "
            f"{reference.strategy}."
        )
    tolerance, medians = _tolerance_text(comparison), _median_text(comparison)
    advice = " Repeat with --precision fp32 to distinguish a fault from rounding."
    advice = "" if comparison.work["precision"] == "fp32" else advice
    for row in comparison.departing:
        if row is reference:
            yield (
                f"❌ {row.strategy}'s own repeats differ by {row.difference:.1e}{medians} at "
                f"step {row.difference_step}; {tolerance}. The same command must give the "
                "same losses: find out what changed between the repeats."
            )
        else:
            expected = reference.completed[0].losses[row.departs_at - 1]
            yield (
                f"❌ {row.strategy} does not train the same model: its loss first differs by more "
                f"than the tolerance at step {row.departs_at} (loss {row.departing_loss:.6f}, "
                f"{reference.strategy} {expected:.6f}). The largest relative difference is "
                f"{row.difference:.1e}{medians}, at step {row.difference_step}; "
                f"{tolerance}.{advice}"
            )


def _same_model(comparison: Comparison, reference: Row) -> Iterator[str]:
    """Name the strategies that train what the reference trains."""
    rows = [row for row in comparison.compared if row.departs_at is None]
    if rows:
        worst = max(rows, key=lambda row: row.difference)
        yield (
            f"✅ Same model: the losses of {_names(rows)} agree with those of "
            f"{reference.strategy}. Over {comparison.work['steps']} steps the largest relative "
            f"difference is {worst.difference:.1e}{_median_text(comparison)} "
            f"({worst.strategy}, step {worst.difference_step}); {_tolerance_text(comparison)}."
        )
    elif not comparison.departing:
        yield f"ℹ️  Only {reference.strategy} completed, so no losses could be compared."
    if reference.difference and reference not in comparison.departing:
        yield (
            f"ℹ️  {reference.strategy}'s own repeats differ from its first run by up to "
            f"{reference.difference:.1e}."
        )


def _control(comparison: Comparison, reference: Row) -> Iterator[str]:
    """Say whether the losses would show a strategy that trains slightly differently."""
    control = comparison.control
    if control is None or not comparison.compared:
        return
    lr, usual_lr = (row.completed[0].steps[0]["lr"] for row in (control, reference))
    text = (
        f"Control: with a {100 * (lr / usual_lr - 1):.0f}% higher learning rate the losses of "
        f"{reference.strategy} differ by up to {control.difference:.1e}"
    )
    if control.departs_at:
        yield (
            f"{text}, and exceed the tolerance at step {control.departs_at}. The comparison "
            "detects a fault of this size."
        )
    else:
        yield (
            f"ℹ️  {text}, which is within the tolerance. The comparison does not detect a fault of "
            "this size: use --precision fp32 or more steps."
        )


def _fastest(comparison: Comparison, rows: list[Row]) -> str:
    fastest, *others = sorted(rows, key=lambda row: -row.samples_per_second)
    text = f"Fastest: {fastest.strategy}, {human_rate(fastest.samples_per_second)} samples/s"
    if others:
        ratio = others[-1].samples_per_second / fastest.samples_per_second
        text += f"; slowest: {others[-1].strategy}, {ratio:.2f} times that"
    slowest_repeat = fastest.samples_per_second_low
    overlap = [row.strategy for row in others if row.samples_per_second_high > slowest_repeat]
    # Without repeats the spread is that of one run's steps, which has other causes.
    if comparison.repeated and overlap:
        text += f" (within the spread of repeats: {', '.join(overlap)})"
    if not comparison.on_gpu:
        text += ". The ranks share this CPU and its memory, so the order can differ on GPUs"
    return f"{text}."


def _smallest(comparison: Comparison, reference: Row, rows: list[Row]) -> str:
    by_memory = sorted(rows, key=lambda row: row.memory_bytes)
    least = by_memory[0]
    of_states = "of model states per rank at the end of backward"
    usage = "per rank at its peak" if comparison.on_gpu else of_states
    text = f"Least GPU memory: {least.strategy}, {human_bytes(least.memory_bytes)} {usage}"
    if least is not reference:
        text += f" ({reference.strategy}: {human_bytes(reference.memory_bytes)})"
    other_memory = []
    if in_host := sum(least.host_categories.values()):
        other_memory.append(f"{human_bytes(in_host)} per rank in host memory")
    if least.nvme_bytes:
        other_memory.append(f"{human_bytes(least.nvme_bytes)} on NVMe in total")
    if other_memory:
        text += f"; in addition {' and '.join(other_memory)}"
    on_device = next((row for row in by_memory if not row.definition.offloads), None)
    if least.definition.offloads and on_device:
        text += f". Without offloading: {on_device.strategy}, {human_bytes(on_device.memory_bytes)}"
    return f"{text}."


def _limits(comparison: Comparison, rows: list[Row]) -> Iterator[str]:
    """Say what this comparison cannot show: on one rank, and on a CPU."""
    if comparison.work["world_size"] == 1:
        kinds = {row.strategy: row.definition for row in rows}
        sharded = [name for name, kind in kinds.items() if kind.sharded and not kind.offloads]
        names = f" ({', '.join(sharded)}: sharding over one rank saves nothing)" if sharded else ""
        yield (
            f"ℹ️  One {'GPU' if comparison.on_gpu else 'process'} cannot show what sharding saves "
            f"or what communication costs{names}. Compare on two or more."
        )
    if not comparison.on_gpu:
        yield (
            "ℹ️  On a CPU the memory column counts the parameters, gradients and optimizer "
            "states that a GPU would hold at the end of backward, without temporary memory: "
            "activations, gathered layers, buckets. Host peak is that of the whole process, "
            "including the libraries."
        )


def _incomplete(comparison: Comparison) -> Iterator[str]:
    """Give status, reason and log of each strategy that did not complete."""
    for row in comparison.rows:
        if row.status == "completed":
            continue
        mark = "ℹ️ " if row.status in ("skipped", "not run") else "❌"
        text = f"{mark} {row.strategy}: {row.status.replace('_', ' ')}"
        if row.completed:
            text += f" ({len(row.completed)} of {len(row.attempts)} repeats completed)"
        text += "."
        if row.incomplete:
            text += f" {row.incomplete.reason}"
            if row.status != "interrupted":
                text += f" Log: {row.incomplete.folder / 'log.txt'}"
        yield text


def explain_traffic(comparison: Comparison) -> list[str]:
    """Explain each strategy's communication, from the counted collectives and the ZeRO paper."""
    if comparison.reference is None:
        return []
    ranks, parameters = comparison.work["world_size"], comparison.work["parameters"]
    if ranks == 1:
        return ["One rank sends nothing."]
    rows_by_text: dict[str, list[Row]] = {}
    for row in comparison.rows:
        if row.volume is not None:
            text = _traffic_of(row, parameters, comparison.work["gradient_accumulation_steps"])
            rows_by_text.setdefault(text, []).append(row)
    return [
        f"P = {parameters:,} parameters. As in the paper, the volume is the number of elements "
        "that are gathered or reduced, counted twice for an all-reduce. A rank sends (N−1)/N = "
        f"{(ranks - 1) / ranks:.2f} of it, times the bytes per element.",
        *[f"{_names(rows)}: {text}." for text, rows in rows_by_text.items()],
    ]


def _traffic_of(row: Row, parameters: int, micro_steps: int) -> str:
    volume_by_kind = volumes(row.collectives, parameters)
    gathered = volume_by_kind.get("all_gather", 0) + volume_by_kind.get("broadcast", 0)
    reduced = row.volume - gathered
    all_reduces = volume_by_kind.get("all_reduce", 0) > reduced / 2
    operation = "all-reduce" if all_reduces else "reduce-scatter"
    text = f"gradients {reduced:.2f}P by {operation} in {_types(row, 'reduce')}"
    if gathered > 0.005:
        text += f", parameters {gathered:.2f}P by all-gather in {_types(row, 'gather')}"
    reasons = []
    if row.definition.stage in (1, 2) and all_reduces:
        reasons.append(
            "the paper reduces each part of the gradients to its owner only, 1P; DeepSpeed "
            "all-reduces buckets"
        )
    if micro_steps > 1 and row.definition.stage >= 2:
        reasons.append(
            f"no rank keeps whole gradients, so they are reduced after each of the {micro_steps} "
            "micro-batches"
        )
    if row.definition.shards_parameters:
        reason = "parameters are gathered for forward and for backward"
        if micro_steps > 1:
            reason += f", in each of the {micro_steps} micro-batches"
        if gathered / micro_steps > 2.005:
            reason += ", some more often than that"
        elif gathered / micro_steps < 1.98:
            of_fsdp = ", the outermost (embeddings) only once"
            reason += of_fsdp if row.definition.engine == "fsdp" else ", some less often"
        reasons.append(reason)
    return f"{text} ({'; '.join(reasons)})" if reasons else text


def _types(row: Row, verb: str) -> str:
    """Return the types that carry more than 1% of the bytes each: "fp32", "fp32 and bf16".

    Args:
        verb: "gather" or "reduce", which selects the collectives.
    """
    bytes_by_dtype: Counter[str] = Counter()
    for name, entry in row.collectives.items():
        kind, dtype = name.split(" ")
        if verb in kind:
            bytes_by_dtype[dtype] += entry["message_bytes"]
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    least = 0.01 * sum(bytes_by_dtype.values())
    names = [short.get(dtype, dtype) for dtype, size in bytes_by_dtype.items() if size > least]
    return " and ".join(names) or "nothing"


def _names(rows: list[Row]) -> str:
    *names, last = [row.strategy for row in rows]
    return f"{', '.join(names)} and {last}" if names else last
