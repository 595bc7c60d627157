"""Task 4: strategy, batch, hours and price of three machines, judged by the planner."""

import functools
from typing import NamedTuple

from distributed_training import Plan, plan
from distributed_training.files.json_types import JsonObject
from distributed_training.strategies.table import PREFERENCE
from tools.lab.answers import choice_of, number_of, read_answer
from tools.lab.task import Place
from tools.lab.verdict import Finding, passed, right, wrong

MODEL, LENGTH, TOKENS, GLOBAL_BATCH, DEADLINE = "gpt2-xl", 1024, 1e9, 64, 48
FLOPS = 6  # per parameter and token
PARTS = {"optimizer": "the optimizer states", "buffers": "the buffers of the communication"}
TOLERANCE = 0.1


class Machine(NamedTuple):
    """A machine of the page: memory in GB, peak in FLOP/s of a GPU, price of a GPU-hour."""

    gpus: int
    gpu_memory: float
    host_memory: float
    peak: float
    mfu: float
    price: float

    @property
    def sequences(self) -> int:
        """The sequences of a GPU in a step."""
        return GLOBAL_BATCH // self.gpus

    @functools.cache  # noqa: B019 (the machines are constants)
    def plan(self, strategy: str, batch_size: int = 1, accumulation: int | None = None) -> Plan:
        """Plan a run on this machine.

        Args:
            accumulation: micro-batches of a step (default: those that make up the global batch).
                With more than one, zero1 keeps all gradients between them, so it needs more memory.
        """
        return plan(
            MODEL,
            strategy,
            gpus=self.gpus,
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
            seq_length=LENGTH,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation or self.sequences // batch_size,
        )

    def cost(self) -> tuple[float, float]:
        """Return the hours and the price of the run."""
        of_run = self.plan("dp")
        rate = self.gpus * self.peak * self.mfu / (FLOPS * of_run.workload.model.total)
        cost = of_run.cost(tokens=TOKENS, tokens_per_second=rate, price=self.price)
        assert cost.price is not None
        return cost.hours, cost.price


MACHINES = {
    "A": Machine(1, 24, 64, 165e12, 0.10, 0.50),
    "B": Machine(4, 16, 128, 70e12, 0.30, 0.35),
    "C": Machine(8, 80, 512, 312e12, 0.40, 2.50),
}


def check(place: Place) -> list[Finding]:
    """Check the three machines; then the choice."""
    answer = read_answer(place.folder / "answer.json")
    findings = []
    for name, machine in MACHINES.items():
        own = answer.get(name)
        own = own if isinstance(own, dict) else {}
        choice_of(own, "strategy", PREFERENCE)
        found = [judge_memory(machine, own), judge_cost(machine, own)]
        findings += [Finding(one.name, f"{name}: {one.text}") for one in found]
    return [*findings, judge_choice(answer, passed(findings))]


def judge_memory(machine: Machine, own: JsonObject) -> Finding:
    """Judge strategy and batch of a machine; the first mistake is named."""
    strategy = str(own["strategy"])
    batch, accumulation = (int(number_of(own, key)) for key in ("batch_size", "accumulation"))
    if batch < 1 or accumulation < 1:
        return wrong("no_batch", "batch_size and accumulation are at least 1.")
    total = batch * machine.gpus * accumulation
    if total != GLOBAL_BATCH:
        if batch * accumulation == GLOBAL_BATCH:
            return wrong(
                "forgot_the_ranks",
                "The global batch is too large: batch_size is that of "
                "each GPU, and all of them compute a micro-batch.",
            )
        return wrong(
            "global_batch",
            f"The global batch is {total} and not {GLOBAL_BATCH}: "
            "batch_size × GPUs × accumulation.",
        )
    return judge_strategy(machine, strategy, batch) or judge_batch(machine, strategy, batch)


def judge_strategy(machine: Machine, strategy: str, batch: int) -> Finding | None:
    """Return what is wrong with the strategy of a machine; None if it is the first that fits."""
    smallest = machine.plan(strategy)
    if not smallest.fits:
        largest = max(smallest.memory, key=lambda part: smallest.memory[part])
        return wrong(
            "does_not_fit",
            f"{strategy} does not fit, not even with one sequence. Its largest part: "
            f"{PARTS.get(largest, largest)}. Which strategy divides or moves them?",
        )
    simpler = PREFERENCE[: PREFERENCE.index(strategy)]
    if any(machine.plan(name).fits for name in simpler):
        same_batch = any(machine.plan(name, batch).fits for name in simpler)
        return wrong(
            "shards_too_much",
            f"{strategy} fits, but a strategy that communicates less, or waits for faster memory, "
            f"fits as well{'' if same_batch else ' with fewer sequences in a micro-batch'}.",
        )
    return None


def judge_batch(machine: Machine, strategy: str, batch: int) -> Finding:
    """Judge the micro-batch of a machine whose strategy is right."""
    accumulation = machine.sequences // batch
    if not machine.plan(strategy, batch).fits:
        if machine.plan(strategy, batch, accumulation=1).fits:
            return wrong(
                "accumulation_not_planned",
                f"{strategy} is right. {batch} sequences fit if a step has one micro-batch, but "
                f"not with {accumulation}. Did you plan with the accumulation of your answer? "
                "Which model states does this strategy keep whole until the last micro-batch?",
            )
        return wrong(
            "batch_too_large",
            f"{strategy} is right, but {batch} sequences do not fit: "
            "activations and logits grow with the micro-batch, and are not divided.",
        )
    larger = [machine.sequences // n for n in range(1, accumulation) if accumulation % n == 0]
    if any(machine.plan(strategy, size).fits for size in larger):
        return wrong(
            "batch_too_small",
            f"{strategy} is right, and {batch} fits, but so do larger "
            "micro-batches: each micro-batch more costs time.",
        )
    return right(f"{strategy} with {batch} × {accumulation} fits, and is the simplest that does.")


def judge_cost(machine: Machine, own: JsonObject) -> Finding:
    """Judge hours and price."""
    hours, price = (number_of(own, key) for key in ("hours", "price"))
    right_hours, right_price = machine.cost()
    if not is_close(hours, right_hours):
        return explain_hours(machine, hours / right_hours)
    if is_close(price, right_price):
        return right("Hours and price are right.")
    if machine.gpus > 1 and is_close(price * machine.gpus, right_price):
        return wrong("price_of_one_gpu", "The hours are right, but this is the price of one GPU.")
    return wrong("price", "The hours are right; the price is not hours × GPUs × price.")


def explain_hours(machine: Machine, factor: float) -> Finding:
    """Name the mistake that gives this factor between the hours and the right ones."""
    mistakes = {
        "gpu_hours": (machine.gpus, "These are GPU-hours: all GPUs work at the same time."),
        "seconds": (3600, "These are seconds."),
        "peak_without_mfu": (machine.mfu, "No run reaches the peak: where is the MFU?"),
        "forward_only": (1 / 3, "This is the forward pass alone."),
        "without_forward": (2 / 3, "This is the backward pass alone."),
    }
    for name, (wrong_factor, text) in mistakes.items():
        if wrong_factor != 1 and is_close(factor, wrong_factor):
            return wrong(name, text)
    return wrong("hours", "The hours are wrong: FLOPs of the run / FLOP/s of all GPUs / 3600.")


def judge_choice(answer: JsonObject, rest_is_right: bool) -> Finding:
    """Judge the choice of the machine; the reason needs right numbers."""
    choice = choice_of(answer, "choice", list(MACHINES))
    costs = {name: machine.cost() for name, machine in MACHINES.items()}
    in_time = {name: price for name, (hours, price) in costs.items() if hours <= DEADLINE}
    if choice == min(in_time, key=lambda name: in_time[name]):
        return right(f"Choice: {choice} is the cheapest that ends in time.")
    if not rest_is_right:
        return wrong("choice", "Choice: look at it again when all hours and prices are right.")
    if choice not in in_time:
        return wrong(
            "too_late",
            f"Choice: {choice} does not end within {DEADLINE} hours. A low "
            "price of an hour is no low price of a run.",
        )
    return wrong(
        "not_the_cheapest",
        f"Choice: {choice} ends in time, but costs more than another "
        "machine that does. The fastest is not the cheapest.",
    )


def is_close(value: float, expected: float) -> bool:
    """Return whether a number is right within the tolerance."""
    return abs(value - expected) <= TOLERANCE * abs(expected)
