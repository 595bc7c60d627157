"""Batch scripts for Slurm, and what they share with launch scripts for machines without a scheduler.

The scripts are files in support/cluster/templates. `@include NAME@` stands for another template,
and `@NAME@` for a value; bash uses $. `python -m support.cluster.slurm` writes `slurm/*.slurm`,
which are these templates with default values. `scripts/distributed_setup.py` fills them in with a
user's choices.
"""

from __future__ import annotations

import operator
import re
from pathlib import Path
from textwrap import indent

from support.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
SIGNAL_SECONDS = 120  # before the time limit
SITE_LINES = [
    "##SBATCH --partition=gpu                # EDIT: remove one # if your site requires it",
    "##SBATCH --account=my-project           # EDIT",
]


def requeue_lines(signal_seconds: int = SIGNAL_SECONDS) -> list[str]:
    """Return the #SBATCH lines of a job that is saved before its limit, and requeued."""
    return [
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append                # one log for all starts",
        f"#SBATCH --signal=USR1@{signal_seconds}                 "
        "# EDIT: seconds for the current step and the checkpoint",
    ]


def read_template(name: str) -> str:
    """Return a template with its includes, which are indented like the lines that name them."""
    text = (TEMPLATES / f"{name}.template").read_text(encoding="utf-8").removesuffix("\n")
    return re.sub(
        r"^( *)@include (\w+)@",
        lambda found: indent(read_template(found[2]), found[1]),
        text,
        flags=re.MULTILINE,
    )


def fill(template: str, values: dict) -> str:
    """Return a template with every @NAME@ replaced by its value; a value is not searched for more."""
    text = read_template(template)
    return re.sub(r"@([A-Z_]+)@", lambda found: str(values[found[1]]), text) + "\n"


def batch_script(
    template: str, about: str, sbatch: list[str], arguments: str = "", **values
) -> str:
    """Return the text of a batch script.

    Args:
        template: name of the template, "job_...".
        about: the first comment lines of the file, with the command that submits it.
        sbatch: further #SBATCH lines.
        arguments: arguments of the training script, before those of the job; empty, or starting
            with a space.
        values: values of other placeholders that differ from the defaults below. CPUS is the number
            of cores per task, TASKS the number of tasks per node: 1 if a launcher starts the ranks,
            otherwise one per GPU. PROJECT_LINE, MODULES and ACTIVATE are shell lines that set
            $project, load the site's modules and select the Python environment.
    """
    defaults = {
        "NAME": "train",
        "NODES": 1,
        "TASKS": 1,
        "GPUS": 4,
        "CPUS": 8,
        "TIME": "02:00:00",
        "PROJECT_LINE": read_template("find_project"),
        "MODULES": "# module load cuda/12.4 gcc/12                            # EDIT",
        "ACTIVATE": read_template("activate"),
        "RANKS": "$ranks",
    }
    values = defaults | values
    return fill(
        template,
        {
            **values,
            "ABOUT": "\n".join(f"# {line}".rstrip() for line in about.splitlines()),
            "TASKS_NOTE": "          # EDIT: as many as GPUs" if values["TASKS"] > 1 else "",
            "MORE_SBATCH": "\n".join(sbatch),
            "ARGUMENTS": arguments,
            "SCRIPT": f'"$project/real_model_example.py" --output_dir "$output"{arguments} "$@"',
        },
    )


def output_dir(argv: list[str]) -> str:
    """Return --output_dir from a job's arguments or from the run file that they name, otherwise "".

    Invalid arguments also give "": the training script reports the error itself.
    """
    from support.cli.flags import build_parser
    from support.cli.run_file import read_run_file

    parser = build_parser()
    try:
        if file := parser.parse_known_args(argv)[0].config:
            argv = [*read_run_file(file, parser), *argv]
        return parser.parse_known_args(argv)[0].output_dir or ""
    except UserError:
        return ""


def seconds_of(time_limit: str) -> int:
    """Return the seconds of a time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S.

    Raises:
        UserError: it has another form, or is 0, which means no limit.
    """
    days, dash, rest = time_limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    if len(parts) > len(units):
        raise UserError(f"--time_limit {time_limit}: write it as HH:MM:SS or D-HH:MM:SS.")
    seconds = 86400 * int(days or 0) + sum(map(operator.mul, parts, units))
    if seconds == 0:
        raise UserError("--time_limit 0 is no limit, and the budget of a run needs one.")
    return seconds


def examples() -> dict[str, str]:
    """Return the example batch scripts of the folder slurm/ as {file name: text}."""
    tasks_per_gpu = {"NODES": 2, "TASKS": 4, "CPUS": 2}
    rows = [
        (
            "train_single_node",
            "One node: torchrun starts one rank per GPU.",
            "job_torchrun_one_node",
            {},
        ),
        (
            "train_multi_node",
            "Several nodes: torchrun, once on each node, starts one rank per GPU.",
            "job_torchrun",
            {"NODES": 2},
        ),
        ("train_srun", "One Slurm task per GPU, without a launcher.", "job_srun", tasks_per_gpu),
        (
            "train_requeue",
            "A run longer than a job's time limit: it is saved before the limit or on preemption,\n"
            "requeued and resumed.",
            "job_requeue",
            {**tasks_per_gpu, "sbatch": [*requeue_lines(), *SITE_LINES], "arguments": " --resume"},
        ),
    ]
    texts = {}
    for name, summary, template, values in rows:
        about = (
            f"{summary}\nFurther arguments are those of real_model_example.py.\n\n"
            f"    sbatch slurm/{name}.slurm      # the embedded model\n"
            f"    sbatch slurm/{name}.slurm --model gpt2 --strategy zero2"
        )
        text = batch_script(template, about, **{"sbatch": SITE_LINES, **values})
        texts[f"{name}.slurm"] = text
    texts["compare.slurm"] = batch_script(
        "job_compare",
        "Compare all strategies on one node; tables and figure are written to the folder of sbatch.\n"
        "Further arguments are those of compare_strategies.sh.\n\n"
        "    sbatch slurm/compare.slurm      # the embedded model\n"
        "    sbatch slurm/compare.slurm gpt2-medium --batch_size 2",
        SITE_LINES,
        NAME="compare",
    )
    return texts


if __name__ == "__main__":
    from support import PROJECT

    for _name, _text in examples().items():
        (PROJECT / "slurm" / _name).write_text(_text)
