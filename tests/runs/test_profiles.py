"""The profile of memory and the trace of a run."""

import json

from memory_checks import WORK, assert_as_predicted


def test_profile_memory_shows_phases_kinds_and_ranks(script):
    flags = "--strategy infinity --max_steps 3 --no_eval --no_export --profile_memory".split()
    run = script(*WORK, *flags, launcher="torchrun", ranks=2)
    words = "Process 1 Memory:|Allocated:|Peak:|model_loaded|optimizer_step|activations|NVMe:"
    assert all(word in run.out for word in [*words.split("|"), "pinned"]), run.out
    memory = run.results["memory"]
    assert len(memory["step_bytes_by_rank"]) == 2 and memory["nvme_written_bytes_per_step"] > 0
    # After the forward pass a step holds its activations, after the backward pass no more.
    step, held = memory["step_bytes_by_rank"][0], memory["categories_bytes_by_rank"][0]
    assert step["forward"]["live"] - step["data"]["live"] >= held["activations"] + held["logits"]
    assert step["backward"]["live"] < step["forward"]["live"] <= step["forward"]["peak"]
    assert_as_predicted(memory, "infinity", run.results["precision"])


def test_trace_is_written_for_each_rank(script, tmp_path):
    args = [*WORK, "--max_steps", "6", "--no_eval", "--no_export", "--profile", tmp_path / "trace"]
    script(*args, launcher="torchrun", ranks=2)
    for rank in (0, 1):
        trace = (tmp_path / "trace" / f"trace-rank{rank}.json").read_text()
        events = json.loads(trace)["traceEvents"]
        names = {"ProfilerStep#3", "aten::addmm", "count a collective"}
        assert names <= {event.get("name") for event in events}
