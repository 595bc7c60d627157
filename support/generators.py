"""What scripts/distributed_setup.py writes. JSON has no comments, so a file says in a key which command made it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

from support import jobs
from support.config import EMBEDDED_MODEL, EMBEDDED_SHAPE, EMBEDDED_VOCABULARY, GPT2_SHAPES, PROJECT, bucket_sizes
from support.errors import UserError


def deepspeed_config(args, made_by: str) -> dict:
    """A configuration without "auto", which is Hugging Face's word and not DeepSpeed's.

    Raises:
        UserError: the flags contradict each other, or the model is not known.
    """
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 cannot both hold: leave one out.")
    if (args.offload_param or args.nvme_path) and args.zero_stage != 3:
        raise UserError(f"--{'offload_param' if args.offload_param else 'nvme_path'} needs --zero_stage 3.")
    if args.nvme_path and not (args.offload_optimizer or args.offload_param):
        raise UserError("--nvme_path says where, but not what: add --offload_optimizer, --offload_param, or both.")
    if args.offload_param and not args.offload_optimizer:
        raise UserError("--offload_param without --offload_optimizer would leave the larger part on the GPU: add it.")
    model = read_model(args.model)
    device = {"device": "nvme", "nvme_path": args.nvme_path} if args.nvme_path else {"device": "cpu"}
    zero: dict = {"stage": args.zero_stage}
    if args.offload_optimizer:
        zero["offload_optimizer"] = {**device, "pin_memory": True}
    if args.offload_param:
        zero["offload_param"] = {**device, "pin_memory": True}
        if args.nvme_path:  # each buffer holds a rank's part of any parameter; on one rank that is all of it
            zero["offload_param"].update(buffer_count=5, buffer_size=model["largest"] + 4096, max_in_cpu=0)
    sizes = bucket_sizes(model["width"], model["parameters"], model["tied"] and bool(args.nvme_path and args.offload_param))
    stage3_only = ("stage3_", "sub_group")
    zero |= {key: size for key, size in sizes.items()
             if key == "reduce_bucket_size" or key.startswith(stage3_only) == (args.zero_stage == 3)}  # fmt: skip
    zero |= {"overlap_comm": True, "contiguous_gradients": True}
    config = {
        "_made_by": made_by,
        "train_micro_batch_size_per_gpu": args.batch_size,
        "bf16": {"enabled": args.bf16},
        "fp16": {"enabled": args.fp16},
        "zero_optimization": zero,
    }
    if args.nvme_path:
        config["aio"] = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    return config


def read_model(name: str) -> dict:
    """{"width", "parameters", "largest", "tied"} of a GPT-2 or of a folder's config.json; parameters are approximate.

    12 · width² a layer (attention 4, MLP 8) and the embeddings.
    Raises:
        UserError: it is neither.
    """
    if name in GPT2_SHAPES or name == EMBEDDED_MODEL:
        layers, _, width = GPT2_SHAPES.get(name, EMBEDDED_SHAPE)
        vocabulary, tied = 50257 if name in GPT2_SHAPES else EMBEDDED_VOCABULARY, True
    else:
        try:
            config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
            layers = config.get("num_hidden_layers") or config["n_layer"]
            width, vocabulary = config.get("hidden_size") or config["n_embd"], config["vocab_size"]
        except (OSError, ValueError, KeyError) as error:
            known = ", ".join([EMBEDDED_MODEL, *GPT2_SHAPES])
            raise UserError(f"--model {name}: take {known}, or a folder with config.json.") from error
        tied = config.get("tie_word_embeddings", True)
    embedding = vocabulary * width
    parameters = 12 * layers * width**2 + embedding * (1 if tied else 2)
    return {"width": width, "parameters": parameters, "largest": embedding, "tied": tied}


def fsdp_config(args, made_by: str) -> dict:
    """The keys that accelerate and transformers read, too."""
    config = {
        "_made_by": made_by,
        "fsdp_sharding_strategy": args.sharding_strategy,
        "fsdp_mixed_precision": args.mixed_precision,
        "fsdp_offload_params": args.offload_params,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": True,
        "fsdp_cpu_ram_efficient_loading": True,
    }
    if args.layer_class:
        config["fsdp_transformer_layer_cls_to_wrap"] = [args.layer_class]
    return config


def read_hosts(path: str) -> list[str]:
    """Host names, one a line; # begins a comment, and DeepSpeed's "slots=4" is ignored.

    Raises:
        UserError: the file cannot be read, names no host, or one that no shell should see.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hosts {path} cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}.") from error
    hosts = [line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip()]
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9@._:%\[\]-]+", host) or host.startswith("-"):
            raise UserError(f"--hosts {path}: {host} is no host name.")
    if not hosts:
        raise UserError(f"--hosts {path} names no host: write one a line, the first is the master.")
    return hosts


def launch_script(args, made_by: str) -> str:
    """A script to run on each machine, or (--hosts) one that starts all of them over ssh."""
    hosts = read_hosts(args.hosts) if args.hosts else []
    if hosts and args.num_nodes not in (1, len(hosts)):
        raise UserError(f"--num_nodes {args.num_nodes} contradicts --hosts {args.hosts}, which names {len(hosts)}.")
    nodes = len(hosts) or args.num_nodes
    if not 0 <= args.node_rank < nodes:
        raise UserError(f"--node_rank {args.node_rank} is none of 0 to {nodes - 1}.")
    if nodes > 1 and not hosts and args.master_addr == "127.0.0.1":
        raise UserError("--num_nodes above 1 needs --master_addr, the first machine as the others see it; or --hosts.")
    template = jobs.OVER_SSH if hosts else jobs.ONE_MACHINE if args.use_deepspeed and nodes == 1 else jobs.EACH_MACHINE
    return jobs.fill(template, {
        "MADE_BY": made_by, "PROJECT": shlex.quote(str(PROJECT)), "CONFIG": config_path(args.config), "NODES": nodes,
        "GPUS": args.num_gpus_per_node, "NODE_RANK": args.node_rank, "MASTER_PORT": args.master_port,
        "MASTER_ADDR": shlex.quote(hosts[0].split("@")[-1] if hosts and args.master_addr == "127.0.0.1" else args.master_addr),
        "HOSTS": " ".join(map(shlex.quote, hosts)), "GPUS_OF_DEEPSPEED": jobs.GPUS_OF_DEEPSPEED,
        "RANKS": args.num_gpus_per_node, "ACTIVATE": jobs.ACTIVATE_ANY,
    })  # fmt: skip


def slurm_job(args, made_by: str) -> str:
    """A batch script from the templates of slurm/."""
    if not re.fullmatch(r"\d+(-\d+)?(:\d+){0,3}", args.time_limit):
        raise UserError(f"--time_limit {args.time_limit}: write it as HH:MM:SS or D-HH:MM:SS.")
    for flag in ("partition", "account"):
        if getattr(args, flag) and not re.fullmatch(r"[\w.,+-]+", getattr(args, flag)):
            raise UserError(f"--{flag} {getattr(args, flag)!r} is no name that Slurm knows.")
    one_node = args.num_nodes == 1 and not args.requeue
    # torchrun kills its ranks 30 s after a signal, so a job that is to be saved does without.
    launch = jobs.REQUEUE.replace("@LAUNCH@", jobs.PLAIN_SRUN) if args.requeue else jobs.TORCHRUN
    about = f"Made by:\n    {made_by}\n\nSubmit it with\n    sbatch {shlex.quote(str(args.output))}"
    job = jobs.Job(about, "train", jobs.DEEPSPEED if args.use_deepspeed and one_node else launch, nodes=args.num_nodes,
                   gpus=args.num_gpus_per_node, cpus=2 * args.num_gpus_per_node, time=args.time_limit)  # fmt: skip
    if args.requeue:
        job.tasks_per_node, job.cpus = args.num_gpus_per_node, 2
    job.sbatch += [f"#SBATCH --{flag}={getattr(args, flag)}" for flag in ("partition", "account") if getattr(args, flag)]
    job.sbatch += jobs.REQUEUE_LINES if args.requeue else []
    job.project = f"project={shlex.quote(str(PROJECT))}"
    if args.modules:
        job.modules = f"module load {' '.join(map(shlex.quote, re.split('[ ,]+', args.modules.strip())))}"
    if args.venv:
        job.activate = f"source {shlex.quote(str(Path(args.venv).expanduser().absolute() / 'bin' / 'activate'))}"
    job.arguments = f" --config {config_path(args.config)}" + (" --resume" if args.requeue else "")
    return job.text()


def config_path(path: str) -> str:
    """The run file for a shell; it must be there, so that a mistake shows now and not in the queue.

    Raises:
        UserError: there is no such file.
    """
    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file.")
    return shlex.quote(str(Path(path).absolute()))


def next_step(args) -> str:
    """What to do with the file."""
    output = shlex.quote(str(args.output))
    return {
        "deepspeed": f"python real_model_example.py --ds_config {output}",
        "fsdp": f"python real_model_example.py --strategy fsdp --fsdp_config {output}",
        "launcher": f"bash {output}" + ("" if getattr(args, "hosts", None) or getattr(args, "num_nodes", 1) == 1
                                        else "    # on each machine, with NODE_RANK=0, 1, …"),
        "slurm": f"sbatch {output}",
    }[args.command]  # fmt: skip
