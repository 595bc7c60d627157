"""Tasks of the lab whose checks run programs: the solution passes, wrong ones are named."""

import json
import sys

import pytest
from conftest import PROJECT, finish, slow, start

from distributed_training import compare_runs, read_run
from tools.lab.pairs import as_lines, make_pairs
from tools.lab.programs import read_ranks, run_on_ranks
from tools.lab.task import Place
from tools.lab.tasks.average import check as average
from tools.lab.tasks.fault import check as fault
from tools.lab.tasks.fault import loops
from tools.lab.tasks.resume import check as resume
from tools.lab.tasks.sharding import check as sharding
from tools.lab.tasks.spike import rows
from tools.runs.outliers import outliers_of

LOOP = PROJECT / "tools" / "lab" / "tasks" / "average" / "files" / "loop.py"
SUM = 'F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")'
MEAN = "F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)"
COUNT = "sum((targets != -100).sum() for _, targets in micro_batches)"


def step(before="", loss=f"{SUM} / total", each="", reduce="", after="", returned="float(shown)"):
    """Return the lines of a train_step. Without arguments it is the solution.

    Args:
        before: replaces the count of tokens.
        loss: of a micro-batch.
        each: is done after each backward pass.
        reduce: replaces the sum of the gradients over the ranks.
        after: is done before the update.
        returned: what it returns.
    """
    total = before or f"total = {COUNT}; dist.all_reduce(total)"
    reduce = reduce or "[dist.all_reduce(p.grad) for p in model.parameters()]"
    return f"""
import torch, torch.distributed as dist, torch.nn.functional as F

def train_step(model, optimizer, micro_batches):
    ranks, count, rank = dist.get_world_size(), len(micro_batches), dist.get_rank()
    optimizer.zero_grad()
    {total}
    shown = torch.zeros((), dtype=torch.float64)
    for inputs, targets in micro_batches:
        logits = model(inputs)
        loss = {loss}
        loss.backward()
        shown += loss.detach()
        {each or "pass"}
    {reduce}
    {after or "pass"}
    own = float(shown)
    dist.all_reduce(shown)
    optimizer.step()
    return {returned}
"""


AGAIN = "[dist.all_reduce(p.grad) for p in model.parameters()]"
OWN = f"total = {COUNT}"
ZEROS = "p.grad = torch.zeros_like(p) if p.grad is None else p.grad; dist.all_reduce(p.grad)"


def skipping_padding(reduce=""):
    """Return a train_step that skips micro-batches of padding: a rank can have no gradients."""
    skip = "        if (targets != -100).sum() == 0: continue\n"
    return step(reduce=reduce).replace("        logits =", f"{skip}        logits =")


# Name of the mistake, with a second program after a colon → the program.
STEPS = {
    "": step(),
    ":skips_padding": skipping_padding(f"for p in model.parameters(): {ZEROS}"),
    "mean_of_means": LOOP.read_text(encoding="utf-8"),
    "mean_over_ranks": step(OWN, f"{SUM} / total / ranks"),
    "mean_over_micro_steps": step(
        "pass", f"{SUM} / (lambda n: (dist.all_reduce(n), n)[1])((targets != -100).sum()) / count"
    ),
    "times_the_ranks": step(after="[p.grad.mul_(ranks) for p in model.parameters()]"),
    "divided_by_the_ranks": step(after="[p.grad.div_(ranks) for p in model.parameters()]"),
    "times_the_micro_batches": step(loss=f"{SUM} / total * count"),
    "divided_by_the_micro_batches": step(loss=f"{SUM} / total / count"),
    "sum_of_means": step(loss=f"{MEAN} / ranks"),
    "sum_over_ranks_of_means": step(OWN),
    "last_micro_batch_only": step(loss=f"(optimizer.zero_grad(), {SUM} / total)[1]"),
    "summed_again": step(each=AGAIN, reduce="pass"),
    "padding_counted": step(
        "total = torch.tensor(sum(t.numel() for _, t in micro_batches)); dist.all_reduce(total)"
    ),
    # Right, except for the mean over no tokens.
    "not_finite": step(loss=f"{MEAN} * (targets != -100).sum() / total"),
    "ranks_differ": step(reduce="pass"),
    "loss_of_one_rank": step(returned="own"),
    "loss": step(returned="float(shown) * 2"),
    "no_loss": step(returned="None"),
    "another_gradient": step(after="[p.grad.pow_(3) for p in model.parameters()]"),
    "error": "import torch\n\ndef train_step(model, optimizer, micro_batches):\n    return none\n",
}
# Runs all programs of a folder in one launch; a launch takes seconds.
ALL_PROGRAMS = """
import sys
from pathlib import Path
import torch.distributed as dist
from tools.lab import harness
from tools.lab.tasks.TASK.harness import run

dist.init_process_group("gloo")
for program in sorted(Path(sys.argv[1]).glob("*.py")):
    (out := program.with_suffix("")).mkdir(exist_ok=True)
    harness.write(program, out, run)
    dist.barrier()
"""


def judged(programs, task, judge_all, folder, ranks=2):
    """Yield the name of each program, and what the check of a task finds."""
    for name, text in programs.items():
        (folder / f"{name or 'solution'}.py").write_text(text, encoding="utf-8")
    program = folder.parent / "all_programs.py"
    program.write_text(ALL_PROGRAMS.replace("TASK", task))
    ended = run_on_ranks(program, folder, ranks=ranks)
    assert ended.code == 0, ended.output
    for name in programs:
        yield name, judge_all(read_ranks(folder / (name or "solution"), ranks), ended.output)


def test_each_mistake_of_an_average_is_named(tmp_path):
    for name, findings in judged(STEPS, "average", average.judge_all, tmp_path):
        mistake = name.partition(":")[0]
        assert {finding.name for finding in findings} - {""} == {mistake} - {""}, findings
        if name == "mean_of_means":
            assert [finding.name for finding in findings] == ["", name]  # right for equal lengths


# Each ends its process group: a launch for each. With only one rank that exchanges, its gradients
# meet the loss of the other; without gradients because of padding, the same, or None.
@pytest.mark.parametrize(
    ("program", "name", "said"),
    [
        slow(step(reduce=f"rank or {AGAIN}"), "unequal_collectives", "same order"),
        slow(skipping_padding(), "error", "a rank of padding"),
        (
            skipping_padding(AGAIN.replace("]", " if p.grad is not None]")),
            "unequal_collectives",
            "same order",
        ),
    ],
    ids=["one_rank_exchanges", "no_gradient", "no_exchange_without_gradient"],
)
def test_ranks_that_do_not_meet_are_explained(tmp_path, program, name, said):
    (tmp_path / "loop.py").write_text(program)
    (finding,) = average.check(Place(tmp_path, 0))
    assert finding.name == name and said in finding.text and "gloo" not in finding.text


@pytest.mark.slow
def test_task_2_from_the_command_line(tmp_path):
    lab = [sys.executable, "-m", "tools.lab"]
    folder = ["--folder", tmp_path / "lab"]

    def run(*argv):
        process = start([*lab, *argv, *folder])
        out, err = finish(process, 200)
        assert "Traceback" not in err
        return process.returncode, out, err

    assert run("start", "2")[0] == 0
    code, out, _ = run("check", "2")
    assert code == 1 and "mean of the means" in out
    loop = tmp_path / "lab" / "2" / "loop.py"
    loop.write_text(step())
    assert run("check", "2")[0] == 0
    progress = json.loads((tmp_path / "lab" / "progress.json").read_text())
    assert progress["tasks"]["2"]["passed_at"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The flags of task 3, with its data."""
    file = tmp_path_factory.mktemp("lab") / "pairs.jsonl"
    file.write_text(as_lines(make_pairs(64, seed=0)))
    flags = "--seq_length 64 --max_steps 6 --dropout 0 --precision fp32 --no_eval --no_export"
    return ["--dataset", file, *flags.split()]


@pytest.fixture(scope="module")
def reference(script, work):
    return script(*work, "--batch_size", "8").folder


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(loops.FAULTS | loops.HARMLESS))
def test_a_fault_shows_and_a_harmless_change_does_not(script, work, reference, name, tmp_path):
    """One split is enough: two ranks with two micro-batches, and sequences of unequal lengths."""
    loops.copy_project(tmp_path / "copy")
    changed = tmp_path / "copy" / loops.SCRIPT
    changed.write_text(loops.changed((PROJECT / loops.SCRIPT).read_text(), name))
    split = ["--batch_size", "2", "--gradient_accumulation_steps", "2"]
    run = script(*work, *split, launcher="torchrun", ranks=2, program=changed, real=True)
    comparison = compare_runs(reference, run.folder)
    assert bool(comparison.departing) is (name in loops.FAULTS)
    assert run.results["code_digest"] == fault.digest_of(tmp_path / "copy") != fault.code_digest()


# ----------------------------------------------------------------------------------------- task 7
FSDP = PROJECT / "tools" / "lab" / "tasks" / "sharding" / "files" / "fsdp.py"
RIGHT = {
    "shard": "nn.Parameter(flatten(block).chunk(dist.get_world_size())[dist.get_rank()].clone())",
    "gather": "whole = own.new_empty(own.numel() * dist.get_world_size())\n"
    "        dist.all_gather_into_tensor(whole, own.contiguous()); return whole",
    "back": "gradient = gradient.contiguous().clone()\n        dist.all_reduce(gradient)\n"
    "        return gradient.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()",
    "loop": "x = checkpoint(one, block, own, x, use_reentrant=False)",
}


def fsdp(**changed):
    """Return the program with parts of the solution, of which some are replaced."""
    parts = RIGHT | changed
    head = FSDP.read_text(encoding="utf-8").partition("# ----")[0]
    return f"""{head}
from torch.utils.checkpoint import checkpoint

def shard(block):
    return {parts["shard"]}

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        {parts["gather"]}

    @staticmethod
    def backward(ctx, gradient):
        {parts["back"]}

def one(block, own, x):
    return call(block, Gather.apply(own), x)

def forward(blocks, shards, x):
    {parts.get("before", "pass")}
    for block, own in zip(blocks, shards):
        {parts["loop"]}
    return x
"""


MEAN_BACK = RIGHT["back"]
MINE = "chunk(dist.get_world_size())[dist.get_rank()]"
LATE = "x = checkpoint(lambda {}: call({}, Gather.apply({}), x), {}, use_reentrant=False)"
# Name of the mistake, with a second program after a colon → the program.
PROGRAMS = {
    "": fsdp(),
    ":lambda": fsdp(loop=LATE.format("own, x, block=block", "block", "own", "own, x")),
    ":one_vector": fsdp(  # for all shards; and reduce_scatter_tensor
        shard=f"nn.Parameter(all_shards(flatten(block).{MINE}))",
        back="own = gradient.new_empty(len(gradient) // dist.get_world_size())\n"
        "        dist.reduce_scatter_tensor(own, gradient.contiguous())\n"
        "        return own / dist.get_world_size()",
    )
    + """
base, used = torch.empty(48, dtype=torch.double), 0

def all_shards(own):
    global used
    place = base[used : (used := used + len(own))]
    return place.copy_(own)
""",
    "late_binding:block": fsdp(loop=LATE.format("own, x", "block", "own", "own, x")),
    "late_binding:shard": fsdp(loop=LATE.format("x, block=block", "block", "own", "x")),
    "late_binding:both": fsdp(loop=LATE.format("x", "block", "own", "x")),
    "view_of_the_whole": fsdp(shard=f"nn.Parameter(flatten(block).{MINE})"),
    "view_of_the_gradient": fsdp(
        back=MEAN_BACK.replace(
            "return gradient", "return (gradient / dist.get_world_size())"
        ).replace("] / dist.get_world_size()", "]")
    ),
    "same_part": fsdp(shard=RIGHT["shard"].replace("dist.get_rank()", "0")),
    "other_parts": fsdp(shard=RIGHT["shard"].replace("[dist.get_rank()]", "[dist.get_rank() - 1]")),
    "gathered_wrong": fsdp(
        gather=RIGHT["gather"].replace("return whole", "return whole.roll(own.numel())")
    ),
    "divided_by_two": fsdp(back=MEAN_BACK.replace("/ dist.get_world_size()", "/ 2")),
    "unequal_shards:two_ranks": fsdp(shard="nn.Parameter(flatten(block).chunk(2)[0].clone())"),
    "not_sharded": FSDP.read_text(encoding="utf-8"),
    "unequal_shards": fsdp(
        shard="nn.Parameter(flatten(block)[: 10 + dist.get_rank()].clone())",
        gather="return own.new_zeros(36) + own.sum()",
        back="return gradient[: 10 + dist.get_rank()]",
    ),
    "not_resharded": fsdp(loop="x = one(block, own, x)"),
    "partly_resharded": fsdp(
        before="kept = Gather.apply(shards[0]); Gather.kept = kept",
        loop="x = call(block, kept, x) if own is shards[0] else "
        "checkpoint(one, block, own, x, use_reentrant=False)",
    ),
    "sum_not_mean": fsdp(back=MEAN_BACK.replace(" / dist.get_world_size()", "")),
    "divided_twice": fsdp(back=MEAN_BACK + " / dist.get_world_size()"),
    "not_reduced": fsdp(
        back="return gradient.chunk(dist.get_world_size())[dist.get_rank()].contiguous()"
    ),
    "part_of_rank_0": fsdp(back=MEAN_BACK.replace("[dist.get_rank()]", "[0]")),
    "no_gradient": fsdp(
        loop="x = checkpoint(one, block, own.detach(), x.requires_grad_(), use_reentrant=False)"
    ),
    "another_gradient": fsdp(back=MEAN_BACK + " * 5"),
    "error": fsdp(shard="nothing"),
}


def test_each_mistake_of_sharding_is_named(tmp_path):
    check, ranks = sharding.judge_all, sharding.RANKS
    for name, findings in judged(PROGRAMS, "sharding", check, tmp_path, ranks):
        assert {finding.name for finding in findings} - {""} == {name.split(":")[0]} - {""}, name


# ----------------------------------------------------------------------------------- tasks 5 and 6
@pytest.mark.slow
def test_a_checkpoint_remembers_who_wrote_it(script, tmp_path):
    """What task 5 reads: a run of one rank, whose newest checkpoint is damaged, resumed on two."""
    flags = "--save_every 2 --seq_length 32 --dropout 0 --precision fp32 --no_eval --no_export"
    work, folder = flags.split(), tmp_path / "run"
    whole = script(*work, "--max_steps", "8", "--batch_size", "4", folder=tmp_path / "whole")
    script(*work, "--max_steps", "4", "--batch_size", "4", folder=folder)
    file = next((folder / "checkpoints" / "step-00000004").glob("*.safetensors"))
    file.write_bytes(b"damaged")
    split = ["--max_steps", "8", "--batch_size", "2", "--resume"]
    run = script(*work, *split, launcher="torchrun", ranks=2, folder=folder)
    saved = resume.read_checkpoints(folder / "checkpoints")
    assert [(one.step, one.aside, bool(one.damage), one.ranks) for one in saved] == [
        *((2, False, False, 1), (4, False, False, 2), (4, True, True, 1)),
        *((6, False, False, 2), (8, False, False, 2)),
    ]
    runs = [read_run(one.folder) for one in (whole, run)]
    assert resume.resumed_from(runs[1], saved) == 2
    # This run ended by itself, with fewer steps.
    assert resume.judge_interruption(runs[1], saved).name == "ended_by_itself"


@pytest.mark.slow
def test_the_damaged_row_makes_a_spike(script, tmp_path):
    """With the flags of the page, the loss of its step is far above those around it."""
    rows.prepare(Place(tmp_path, 3))
    flags = "--validation_split 0 --max_steps 40 --batch_size 4 --seq_length 64 --lr 1e-3"
    more = "--dropout 0 --precision fp32 --no_eval --no_export"
    run = script("--dataset", tmp_path / rows.FILE, *flags.split(), *more.split())
    step = rows.step_of(rows.bad_line(3))
    late = run.losses[rows.FIRST - 2 :]
    assert max(late) == run.losses[step - 1] > 2 * sorted(late)[-2]
    assert outliers_of(run.metrics)[0].step == step  # scripts/report.py, which the page names
