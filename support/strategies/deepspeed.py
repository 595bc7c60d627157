"""Before DeepSpeed takes over: its configuration for this model and machine, and its messages."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import shlex
import warnings

import torch
from torch import nn
from torch.utils import cpp_extension

from support.cli import validate as preflight
from support.cli.flags import complete_ds_config, uses_nvme
from support.cluster.context import Run
from support.strategies import op_builds as compilation


def configure_deepspeed(args, run: Run, blueprint) -> None:
    """Complete DeepSpeed's JSON for this model and device."""
    import cpuinfo
    import deepspeed

    if not args.verbose:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if uses_nvme(args.ds_config_dict):

        def make_folder() -> str:
            folder = preflight.make_nvme_folder(
                args.nvme_path,
                blueprint.parameters,
                1 if run.simulated else run.launch.local_world_size,
                run.world_size,
            )
            run.temporary += folder.paths
            return str(folder.path)

        args.nvme_folder = run.once_per_node("nvme folder", make_folder)
    # Each op that is loaded asks for it twice, and an answer takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    # Torch quotes the folders of headers but not the one of its libraries: a space in its path
    # would end the compilation.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)

    def say(text: str) -> None:
        if run.launch.is_node_leader and not run.quiet:
            run.print(f"ℹ️  {text}")

    compilation.guard_compilations(run.attempt or f"simulation {os.getpid()}", say)
    if ops := preflight.ops_to_compile(args.strategy, run.device):
        run.warn(f"DeepSpeed compiles {', '.join(ops)}: a minute or two, once on this machine.")
    # Under its own launcher DeepSpeed reduces through this file of 69 MB, on a CPU, and leaves it
    # there.
    buffer = f"deepspeed_allreduce_buffer_{os.getuid()}_{run.launch.master_addr}_{run.launch.master_port}_{run.rank}"
    run.temporary.append(f"/dev/shm/{buffer}")
    with quiet(args.verbose):
        deepspeed.init_distributed(
            dist_backend=run.backend
        )  # takes over the process group that is there
    if run.simulated and "fp16" in args.ds_config_dict:
        args.ds_config_dict["fp16"]["loss_scale"] = (
            1  # gradients would overflow, and their steps be left out
        )
    complete_ds_config(
        args.ds_config_dict,
        precision=run.precision,
        hidden_size=blueprint.text_config.hidden_size,
        parameters=blueprint.parameters,
        largest_parameter=blueprint.largest_parameter,
        tied=blueprint.tied,
        world_size=run.world_size,
        nvme_folder=args.nvme_folder,
    )


class OneByOne(nn.Module):
    """Shows DeepSpeed a model's parameters one after the other, each copied into memory only when
    its turn comes.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.whole, self.dtype = model, dtype

    def parameters(self, recurse: bool = True):
        for parameter in self.whole.parameters(recurse):
            parameter.data = parameter.data.to(self.dtype, copy=True)
            yield parameter


@contextlib.contextmanager
def quiet(verbose: bool):
    """Hide what libraries print while they set up; on an error the caller still gets the exception."""
    if verbose:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
