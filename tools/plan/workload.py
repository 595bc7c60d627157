"""From the planner's flags to the workload of a run and the available memory."""

from dataclasses import replace

from distributed_training.cli.parser import Options
from distributed_training.errors import UserError
from distributed_training.memory.fit import Devices, Limits, planned_device, ranks_of_node
from distributed_training.planning import planned_workload
from distributed_training.workload.architectures import name_on_hub
from distributed_training.workload.workload import Device, Workload
from tools.plan import cost
from tools.plan.unequal import UnequalGpus


def read_workload(args: Options) -> tuple[Options, Workload, Devices]:
    """Return the arguments with the defaults of --gpus and --seq_length, the workload and limits.

    Raises:
        UserError: flags do not fit together, or the model cannot be planned.
    """
    gpus, per_node = number_of_gpus(args)
    if args.solve == "gpus" and not args.gpu_memory:
        raise UserError("--solve gpus needs --gpu_memory: processes on a CPU share its memory.")
    cost.is_planned(args)  # raises if its flags do not fit together
    device = planned_device(args.precision) if args.gpu_memory else Device("cpu")
    work = planned_workload(args.settings, gpus, device)
    if args.reduce_dtype:  # of each strategy
        work = replace(work, reduce_dtype=args.reduce_dtype)
    model = name_on_hub(args.model)
    args = args.replace(model=model, gpus=gpus, seq_length=work.seq_length)
    host, nvme = args.host_memory, args.nvme_free
    if args.gpu_memory:
        limits = [Limits.in_gb(size, host, nvme, per_node) for size in args.gpu_memory]
    else:
        limits = [Limits.of_cpu(host, nvme, per_node)]
    if not is_unequal(args):
        return args, work, limits[0]
    of_each = limits if len(limits) == gpus else limits * gpus
    speeds = args.gpu_speeds or (1.0,) * gpus
    relative = tuple(speed / max(speeds) for speed in speeds)
    return args, work, UnequalGpus(tuple(of_each), relative)


def is_unequal(args: Options) -> bool:
    """Return whether memory or speed is given for each GPU."""
    return bool(args.gpu_speeds) or len(args.gpu_memory or ()) > 1


def number_of_gpus(args: Options) -> tuple[int, int]:
    """Return the number of GPUs, and of those of one node.

    Raises:
        UserError: two flags have different numbers.
    """
    if args.nodes and args.gpus:
        raise UserError("--nodes and --gpus set the same number: leave one out.")
    gpus = args.nodes * (args.gpus_per_node or 8) if args.nodes else args.gpus
    lists = {flag: getattr(args, flag) or () for flag in ("gpu_memory", "gpu_speeds")}
    counts = {flag: len(values) for flag, values in lists.items()}
    several = [flag for flag, count in counts.items() if count > 1]
    if (several or counts["gpu_speeds"]) and args.solve == "gpus":
        raise UserError("--solve gpus needs equal GPUs: give one --gpu_memory, no --gpu_speeds.")
    gpus = gpus or max(1, *counts.values())
    # One size of memory is that of every GPU.
    for flag in dict.fromkeys([*several, *(["gpu_speeds"] if counts["gpu_speeds"] else [])]):
        if counts[flag] != gpus:
            given = f"--{flag} has {counts[flag]} value{'s' if counts[flag] > 1 else ''}"
            raise UserError(f"{given} for {gpus} GPUs: give one for each GPU.")
    return gpus, ranks_of_node(gpus, args.gpus_per_node)
