"""From the planner's flags to the workload of a run and the available memory."""

from dataclasses import replace

from support.cli.parser import Options
from support.errors import UserError
from support.gpu_generations import HOPPER, TURING
from support.memory.find_architecture import find_architecture
from support.memory.fit import Limits, host_memory
from support.report import cost
from support.settings.data import choose_seq_length
from support.units import GB
from support.workload.architectures import name_on_hub
from support.workload.workload import Device, Kernels, Workload, adapters


def read_workload(args: Options) -> tuple[Options, Workload, Limits]:
    """Return the arguments with the defaults of --gpus and --seq_length, the workload and limits.

    Raises:
        UserError: flags do not fit together, or the model cannot be planned.
    """
    if args.nodes and args.gpus:
        raise UserError("--nodes and --gpus set the same number: leave one out.")
    gpus = args.nodes * (args.gpus_per_node or 8) if args.nodes else args.gpus or 1
    per_node = min(args.gpus_per_node or 8, gpus)
    if gpus % per_node:
        raise UserError(f"--gpus {gpus} is not a multiple of --gpus_per_node {per_node}: set it.")
    for flag in ("lora_targets", "load_in_4bit"):
        if getattr(args, flag) and not args.lora_r:
            raise UserError(f"--{flag} needs --lora_r.")
    if args.solve == "gpus" and not args.gpu_memory:
        raise UserError("--solve gpus needs --gpu_memory: processes on a CPU share its memory.")
    cost.is_planned(args)  # raises if its flags do not fit together
    model = find_architecture(args.model)
    length = choose_seq_length(args.seq_length, args.model, model.limit)
    args = args.replace(model=name_on_hub(args.model), gpus=gpus, seq_length=length)
    work = Workload(
        model,
        gpus,
        args.batch_size,
        length,
        args.precision,
        args.gradient_checkpointing,
        args.gradient_accumulation_steps,
        # Newer GPUs than those of this capability usually use bf16.
        device=Device("cuda", TURING if args.precision == "fp16" else HOPPER),
        lora=adapters(model, args.lora_r, args.lora_targets, args.load_in_4bit),
        kernels=Kernels(not args.no_fused_gelu, args.isolate_documents, args.compile),
        optimizer=args.optim,
        reduce_dtype=args.reduce_dtype,
    )
    memory = (args.gpu_memory, args.host_memory, args.nvme_free)
    gpu, host, nvme = (None if size is None else int(size * GB) for size in memory)
    if gpu is None:
        # The processes of a node share its memory; it includes what offload keeps in it.
        gpu, host = (host or host_memory()) // per_node, None
        work = replace(work, device=Device("cpu"))
    return args, work, Limits(gpu, host, nvme, per_node)
