"""Values of flags that other flags determine."""

from distributed_training.cli.parser import Options
from distributed_training.known_models import EMBEDDED_MODEL
from distributed_training.settings.data import Dataset, default_dataset
from distributed_training.settings.training import default_learning_rate
from distributed_training.strategies.strategy import FlagValues

CHECK_SECONDS = 60  # --check: the longest wait for another rank
SIMULATED_STEPS = 3  # the first creates Adam's states; the last is measured


def of_commands(flags: Options) -> dict[str, FlagValues]:
    """Return the flags that --check, --replay and --simulate_gpus set."""
    found: dict[str, FlagValues] = {}
    if flags.check and flags.ddp_timeout > CHECK_SECONDS:
        found["--check"] = {"ddp_timeout": CHECK_SECONDS}
    # It looks for the checkpoint itself (a run file may have `resume: true`), and hooks see layers.
    if flags.replay:
        found["--replay"] = {"resume": None, "resume_force": False, "cuda_graph": False}
    if flags.simulate_gpus:
        steps = flags.max_steps or SIMULATED_STEPS
        off = {"eval": False, "no_save": True, "no_export": True, "epochs": None}
        found["--simulate_gpus"] = {"max_steps": steps, **off}
    return found


def set_defaults(flags: Options) -> None:
    """Set the flags whose defaults depend on other flags, in place."""
    is_embedded = flags.model == EMBEDDED_MODEL
    if not flags.dataset:
        # --eval_only uses no other text than --validation_file.
        only = flags.validation_file if flags.eval_only else None
        flags.dataset = (Dataset(only or default_dataset(flags.model)),)
    if flags.lr is None:
        random_weights = flags.from_scratch or is_embedded
        flags.lr = default_learning_rate(flags.optim, random_weights, bool(flags.lora_r))
    if flags.lora_r and flags.lora_alpha is None:
        flags.lora_alpha = 2.0 * flags.lora_r
    flags.hang_seconds = flags.hang_seconds or max(1, flags.ddp_timeout // 10)


def held_out_share(flags: Options) -> float | None:
    """Return the share of the training data that is held out; None: not given."""
    percentage = flags.validation_split_percentage
    return percentage / 100 if percentage else flags.validation_split
