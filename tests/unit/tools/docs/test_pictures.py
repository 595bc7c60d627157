"""The pictures of the documents: drawn from the planner and from traces, small, and shown."""

import re

import pytest
from documents import PROJECT, tracked

from distributed_training.units import GB
from tools.docs.pictures import IMAGES, Bar, collectives_of, lanes_of, parts_of, planned

LARGEST = 150_000  # bytes
PICTURES = sorted(name for name in tracked() if name.startswith("docs/images/"))


def test_the_bars_of_memory_are_those_of_the_planner():
    drawn = re.findall(r">(\d+\.\d)<", (IMAGES / "memory.svg").read_text("utf-8"))
    needs = planned()
    assert drawn == [f"{need.peak / GB:.1f}" for need in needs], "run scripts/draw_pictures.py"
    for need in needs:
        parts = [size for kind, size in parts_of(need).items() if not kind.startswith(("in", "on"))]
        assert sum(parts) == pytest.approx(need.peak / GB), need.strategy


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_shown(name):
    assert (PROJECT / name).stat().st_size < LARGEST
    pages = [PROJECT / page for page in tracked() if page.endswith(".md")]
    link = f"({name.removeprefix('docs/')})"
    assert any(link in page.read_text("utf-8") for page in pages if page.parent.name == "docs")


def event(name: str, start: int, length: int, thread: int = 1) -> dict:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "tid": thread}


# A short step after a long one: forward with a wait inside an operation, backward, update.
TRACE = [
    event("ProfilerStep#2", 0, 90_000),
    event("aten::mm", 10, 80_000),
    event("ProfilerStep#3", 100_000, 30_000),
    event("aten::addmm", 100_000, 1_000),
    event("aten::copy_", 100_100, 50),  # a part of addmm
    event("Gather", 102_000, 4_000),  # starts an all-gather, waits, and computes
    event("c10d::_allgather_base_", 102_000, 100),
    event("aten::mm", 105_000, 1_000),
    event("autograd::engine::evaluate_function: MmBackward", 107_000, 6_000),
    event("aten::mm", 107_000, 2_000),
    event("aten::mul", 109_100, 2_000),  # less than a visible gap after mm
    event("c10d::_reduce_scatter_base_", 111_200, 100),
    event("c10d::allreduce_", 114_000, 100),
    event("aten::_fused_adamw_", 116_000, 3_000),
    event("gloo:all_gather", 102_200, 2_000, 2),
    event("gloo:all_reduce", 111_400, 2_000, 3),
    event("gloo:all_reduce", 114_200, 1_000, 2),
    {"ph": "i", "name": "an instant", "ts": 1},
]


def test_lanes_of_a_trace():
    start, duration, computes, sends = lanes_of(TRACE)
    assert (start, duration) == (100_000, 30_000)
    assert computes == [
        Bar("forward", 100_000, 1_000),
        Bar("forward", 105_000, 1_000),
        Bar("backward", 107_000, 4_100),
        Bar("update", 116_000, 3_000),
    ]
    assert sends == [
        Bar("all-gather", 102_200, 2_000),
        Bar("reduce-scatter", 111_400, 2_000),
        Bar("all-reduce", 114_200, 1_000),
    ]


def test_a_reduction_without_a_call_is_refused():
    """A release of torch that names its calls differently would be drawn wrongly."""
    with pytest.raises(StopIteration):
        collectives_of([event("gloo:all_reduce", 0, 1)])
