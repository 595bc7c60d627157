"""Run the script with one thing broken, as the environment variable FAULT names it:

    crash:RANK:N       that rank raises an exception as it reads its N-th micro-batch
    skip:RANK:N        that rank leaves out its N-th all-reduce of three numbers, the counts of a step
    nan:N              the N-th loss is not a number
    infinite:N         an element of the N-th micro-batch's gradient is infinite, its loss is finite
    gpus:N             torch sees N GPUs (this machine has none)
    unusable_gpu:DEV   the machine has an NVIDIA GPU that torch cannot use; the folder DEV stands for /dev
    unordered:N        at its N-th micro-batch it needs an operation that has no deterministic kernel
    signal:RANK:N      that rank receives SIGUSR1 as it reads its N-th micro-batch
    hang:RANK:N        that rank stops for ever at its N-th micro-batch and ignores SIGTERM
    kill:RANK:N        that rank is killed (SIGKILL) at its N-th micro-batch
    cut:RANK:N         as that rank reads its N-th micro-batch, half of each train.bin under --cache_dir is lost
    oom:N              at its N-th micro-batch every rank has used all the memory it may have, to the last MB
    oom_above:RANK:N   that rank runs out of memory at each micro-batch of more than N sequences
    slow:RANK:SECONDS  that rank needs so many more seconds for each sequence
    kill_saving:WHAT:N the process is killed (SIGKILL) before the N-th tensor file, or manifest, of
    a checkpoint is written
    slow_save:SECONDS  each tensor file of a checkpoint takes so many more seconds to write
    full_disk:RANK:N   the N-th tensor file that this rank writes finds no room: a node whose own disk is full
    logits:FILE        no fault: before the model is exported, its logits for the tokens 0 to 31 go to FILE;
    and a sample has 15 tokens
    deepspeed:RELEASE  no fault: the installed DeepSpeed is this release, according to its metadata
    prove:PYTHON       no fault: --prove starts its runs with this interpreter

Several are joined by "+". FAULT_SCRIPT names another script than the project's.
"""

import errno
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

SCRIPT = Path(
    os.environ.get("FAULT_SCRIPT") or Path(__file__).resolve().parents[2] / "real_model_example.py"
)


def break_steps(step: int, action, rank: int | None = None) -> None:
    """Call action() as a rank (or each) reads its `step`-th micro-batch, counting from 1; reading
    is one step ahead of training.
    """
    from distributed_training.data import batches as data

    served, fill_up = [0], data.fill_up

    def broken(file, indices, rows):
        served[0] += 1
        micro_batch = fill_up(file, indices, rows)
        if served[0] == step and rank in (None, int(os.environ["RANK"])):
            action()
        return micro_batch

    data.fill_up = broken


def wrap(owner, name: str, wrapped) -> None:
    """Replace a function by wrapped(number, original, *args): number counts its calls from 1."""
    original, calls = getattr(owner, name), [0]

    def replacement(*args, **kwargs):
        calls[0] += 1
        return wrapped(calls[0], original, *args, **kwargs)

    setattr(owner, name, replacement)


def crash() -> None:
    raise RuntimeError("a planted crash")


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1_000_000)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def request_stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def cut_cache() -> None:
    for file in Path(sys.argv[sys.argv.index("--cache_dir") + 1]).glob("*/train.bin"):
        os.truncate(file, file.stat().st_size // 2)


def use_all_memory() -> None:
    import resource

    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2**28)


def plant(kind: str, values: list[str]) -> None:
    import torch

    if kind in ("crash", "hang", "kill", "signal", "cut"):
        actions = {"crash": crash, "hang": hang, "kill": kill, "signal": request_stop}
        action = {**actions, "cut": cut_cache}[kind]
        break_steps(int(values[1]), action, rank=int(values[0]))
    elif kind == "oom":
        break_steps(int(values[0]), use_all_memory)
    elif kind == "unordered":
        put = lambda: torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))  # noqa: E731
        break_steps(int(values[0]), put)
    elif kind == "deepspeed":
        from importlib import metadata

        real = metadata.version
        metadata.version = lambda name: values[0] if name == "deepspeed" else real(name)
    elif kind == "skip":
        import torch.distributed as dist

        all_reduce, counted = dist.all_reduce, [0]

        def skip_one(tensor, *args, **kwargs):
            counted[0] += tensor.numel() == 3
            skipped = tensor.numel() == 3 and counted[0] == int(values[1])
            if not (skipped and os.environ["RANK"] == values[0]):
                return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = skip_one
    elif kind == "nan":
        from distributed_training.model import loss

        def not_a_number(number, compute, *inputs):
            return compute(*inputs) * (float("nan") if number == int(values[0]) else 1)

        wrap(loss.OutputLayer, "_loss", not_a_number)
    elif kind == "infinite":
        from distributed_training.model import loss

        def overflow(number, compute, *args, **kwargs):
            found, parts = compute(*args, **kwargs)
            if number == int(values[0]):
                parts[1][0, 0] = float("inf")
            return found, parts

        wrap(loss, "_loss_and_gradients", overflow)
    elif kind == "oom_above":
        from distributed_training.data import batches as data

        def run_out(number, fill_up, file, indices, rows):
            if rows > int(values[1]) and os.environ["RANK"] == values[0]:
                raise torch.OutOfMemoryError("CUDA out of memory. Planted")
            return fill_up(file, indices, rows)

        wrap(data, "fill_up", run_out)
    elif kind == "slow":
        import torch.nn.functional as F

        def sleep(number, embed, ids, *args, **kwargs):
            if os.environ["RANK"] == values[0]:
                time.sleep(len(ids) * float(values[1]))
            return embed(ids, *args, **kwargs)

        wrap(F, "embedding", sleep)
    elif kind == "kill_saving":
        from distributed_training.checkpoints import format as checkpoint_format
        from distributed_training.checkpoints import saving as tensors

        calls = [0]

        def killed(number, write, *args):
            calls[0] += values[0] == "tensors" or args[0].name == "manifest.json"
            if calls[0] == int(values[1]):
                kill()
            return write(*args)

        owner = tensors.PieceFile if values[0] == "tensors" else checkpoint_format
        wrap(owner, "write" if values[0] == "tensors" else "write_text", killed)
    elif kind == "slow_save":
        from distributed_training.checkpoints import saving as tensors

        def save_slowly(number, write, *args):
            time.sleep(float(values[0]))
            return write(*args)

        wrap(tensors.PieceFile, "write", save_slowly)
    elif kind == "full_disk":
        from distributed_training.checkpoints import saving as tensors

        def save(number, write, *args):
            if os.environ["RANK"] == values[0] and number == int(values[1]):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        wrap(tensors.PieceFile, "write", save)
    elif kind == "logits":
        from distributed_training.checkpoints.manager import CheckpointManager
        from distributed_training.model import generate

        generate.NEW_TOKENS = 15

        def speak_and_export(number, trained_model, manager, state):
            manager.objects.model.eval()
            with torch.no_grad():
                logits = manager.objects.model(
                    input_ids=torch.arange(32)[None], use_cache=False
                ).logits
            if os.environ["RANK"] == "0":
                torch.save(logits.clone(), ":".join(values))
            return trained_model(manager, state)

        wrap(CheckpointManager, "trained_model", speak_and_export)
    elif kind == "prove":
        from tools.prove import prove

        prove.PYTHON, prove.SCRIPT = values[0], Path(__file__)
        os.environ.update(PYTHON_EXEC=values[0], FAULT="none")
    elif kind == "gpus":
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: int(values[0])
        torch.cuda.set_device = lambda device: None
        torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=device.index)
        ones = torch.ones  # of a first kernel on the GPU
        torch.ones = lambda *args, device=None, **options: ones(*args, **options)
    elif kind == "unusable_gpu":
        from distributed_training import hardware

        hardware.DEVICES = Path(values[0])
        (hardware.DEVICES / "nvidia0").touch()


if __name__ == "__main__":
    sys.argv[0], sys.path[0] = str(SCRIPT), str(SCRIPT.parent)  # as if Python had started SCRIPT
    for fault in os.environ["FAULT"].split("+"):
        kind, *values = fault.split(":")
        plant(kind, values)
    runpy.run_path(str(SCRIPT), run_name="__main__")
