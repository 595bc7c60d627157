"""Strategy: what every engine offers, with the answers of plain PyTorch, whose states are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from distributed_training.errors import UserError
from distributed_training.optimizers import WHOLE

if TYPE_CHECKING:
    import torch
    from torch import nn

    from distributed_training.optimizers.optimizer import Optimizer
    from distributed_training.strategies.live_states import LiveStates
    from distributed_training.strategies.optimizer_shards import ShardedState
    from distributed_training.workload.activations import Term
    from distributed_training.workload.workload import Workload


FlagValues = Mapping[str, Any]  # the values of flags, by name


@dataclass(frozen=True)
class Flags:
    """The flags of a run, which a strategy merges with its own file."""

    values: FlagValues  # of every flag, by name
    given: frozenset[str]  # names on the command line or in the run file
    parse: Callable[[str, str], Any]  # (flag, text) -> value, or an argparse.ArgumentTypeError
    world_size: int


@dataclass(frozen=True)
class Resolved:
    """A strategy with its options, and what they change."""

    strategy: Strategy
    values: dict[str, Any] = field(default_factory=dict)  # of flags that its file sets, by name
    sources: dict[str, str] = field(default_factory=dict)  # of these values, for --print_config
    notices: tuple[str, ...] = ()  # lines about options without effect
    used: frozenset[str] = frozenset()  # flags of this strategy only


@dataclass(frozen=True)
class Strategy:
    """How a run distributes the model states over its ranks, and all that follows from it.

    The fields are a row of the table of strategies. The methods ask the engine, the library that
    does it; each engine is a subclass in its own folder. `resolve` returns a copy with the run's
    options. Nothing heavy is imported before it is used: the planner and --help need no PyTorch.
    """

    engine: ClassVar[str]  # name of the engine, and of its folder
    # Python packages that it needs, besides the required ones.
    packages: ClassVar[tuple[str, ...]] = ()
    # How it holds the fp32 weights for the optimizer, see optimizers/optimizer.py.
    layout: ClassVar[str] = WHOLE
    # Precisions in which autocast converts fp32 weights. In others the engine converts them.
    autocast_precisions: ClassVar[frozenset[str]] = frozenset(["bf16", "fp16"])
    # Bytes of the engine's library in a process that trains on a CPU.
    library_bytes: ClassVar[int] = 0
    # Whether --cuda_graph may record a micro-batch on one GPU.
    supports_cuda_graph: ClassVar[bool] = False

    title: str  # its full name
    # The model states of which each rank keeps a part, of "parameters", "gradients" and
    # "optimizer".
    sharded: frozenset[str] = frozenset()
    # The dtype in which the ranks reduce the gradients (--reduce_dtype); None: the engine's own.
    reduce_dtype: str | None = field(default=None, kw_only=True)

    # ------------------------------------------------------------------------ what the row answers

    @property
    def whole_parameters(self) -> bool:
        """Whether every rank holds the whole model."""
        return "parameters" not in self.sharded

    @property
    def supports_4bit(self) -> bool:
        """Whether frozen weights may be in 4 bits: bitsandbytes packs them into other shapes."""
        return self.whole_parameters

    def supports_dora(self, in_4bit: bool) -> bool:
        """Return whether a block may compute DoRA's norms of whole weights.

        Args:
            in_4bit: peft computes the first norms from weights in 4 bits, which must be whole.
        """
        return self.whole_parameters or not (in_4bit or self.gathers_single_layers)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer states are kept outside the device."""
        return False

    @property
    def updates_on(self) -> str:
        """Where the engine keeps the optimizer states and updates: "device", "host" or "nvme"."""
        return "device"

    @property
    def needs_nvme(self) -> bool:
        """Whether the run keeps model states on a local disk (--nvme_path)."""
        return False

    @property
    def nvme_folder(self) -> str | None:
        """The folder of the model states that are kept on a local disk; None without any."""
        return None

    @property
    def paper_volume(self) -> int:
        """Elements that a rank sends in a step, in parameters: ZeRO paper, section 7."""
        return 2 if self.whole_parameters else 3

    @property
    def is_standard(self) -> bool:
        """Whether the options are this project's own, which the memory estimate supports."""
        return True

    @property
    def gathers_single_layers(self) -> bool:
        """Whether a weight is whole only while its own layer computes, and not its whole block.

        torch.compile then sees other hooks at each layer of a block, and needs a graph for each.
        """
        return False

    @property
    def replaces_linear(self) -> bool:
        """Whether torch.nn.Linear is replaced by a version that always saves its input."""
        return False

    def on_ranks(self, world_size: int) -> Strategy:
        """Return the strategy that trains on a number of ranks, also simulated ones.

        A single rank has nothing to shard. An engine that would only lose time there trains
        without sharding.
        """
        return self

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Return why the strategy does not support an optimizer, or None if it does."""
        return optimizer.why_not(self.layout, self.updates_on)

    # ------------------------------------------------------------------------- options and checks

    def resolve(self, flags: Flags) -> Resolved:
        """Merge the flags with the file of this strategy, before torch is imported.

        Raises:
            UserError: a flag or the file is for another strategy, or they contradict each other.
        """
        if "deepspeed" in flags.given and not flags.values["ds_config"]:
            raise UserError(
                f"--deepspeed does not fit --strategy {flags.values['strategy']}: give a "
                "configuration (--deepspeed FILE), or --strategy zero1, zero2, zero3, offload or "
                "infinity."
            )
        return Resolved(replace(self, reduce_dtype=self.chosen_reduce_dtype(flags)))

    def chosen_reduce_dtype(self, flags: Flags) -> str | None:
        """Return --reduce_dtype, or else the row's own."""
        return flags.values["reduce_dtype"] or self.reduce_dtype

    def with_micro_batches(self, batch_size: int, accumulation: int) -> Strategy:
        """Return a copy for other micro-batches, whose number is `accumulation` in each step."""
        return self

    def check_options(self, verbose: bool) -> None:
        """Let the library check the user's file. It imports the library.

        Raises:
            UserError: a value is not valid, or a key is unknown.
        """

    def check_requirements(self, accumulation: int) -> None:
        """Check what the strategy needs of this machine and its libraries.

        Args:
            accumulation: micro-batches of a step.
        Raises:
            MissingRequirement: a release, a compiler or a library is missing, or the installed
                release trains the strategy wrongly.
        """

    def check_4bit(self) -> None:
        """Check what frozen weights in 4 bits need, if the strategy supports them.

        Raises:
            MissingRequirement: the installed torch cannot shard them.
        """

    def needed_ops(self) -> list[str]:
        """Return the names of C++ ops that must be compiled once."""
        return []

    def missing_ops(self) -> list[str]:
        """Return the ops of `needed_ops` that are not compiled yet for this machine."""
        return []

    def group_options(self, backend: str, device: torch.device, world_size: int) -> dict[str, Any]:
        """Return keyword arguments of `dist.init_process_group`: `backend`, and maybe `device_id`.

        Args:
            backend: "nccl", "gloo", or "fake" in a simulation of ranks.
        """
        return {"backend": backend}

    def mixes_dtypes(self) -> bool:
        """Whether one module may have trained weights in fp32 and frozen ones in 16 bits."""
        return True

    # ------------------------------------------------------------------------------------- memory

    def check_model(self, build: Callable[[], nn.Module]) -> None:
        """Check that the options of the strategy fit the model that `build` returns, without data.

        Raises:
            UserError: they do not.
        """

    def memory_terms(self, work: Workload) -> tuple[list[Term], int]:
        """Estimate the memory of the model states of one rank.

        Returns:
            The terms without activations and loss, and the bytes that a rank sends per step, before
            the factor (N - 1) / N for N ranks.
        """
        raise NotImplementedError

    # --------------------------------------------------------------------------- states on a rank

    def states_of(self, model: nn.Module, optimizer: object, device: torch.device) -> ShardedState:
        """Return the fp32 weights and optimizer states of this rank, for checkpoints and export.

        Args:
            model: without its wrapper.
        """
        raise NotImplementedError

    def live_states(self, model: nn.Module, optimizer: object) -> LiveStates:
        """Return the tensors of the model states that are in memory at present."""
        from distributed_training.strategies.live_states import plain_states

        return plain_states(model, optimizer)

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the bytes of parameters that are gathered at present on this rank."""
        return 0

    def gathers(self, module: nn.Module) -> bool:
        """Return whether a forward pass of a module waits for parameters of other ranks."""
        return False

    def free_gathered(self, model: nn.Module) -> None:
        """Free the whole weights that the engine keeps after an evaluation."""
