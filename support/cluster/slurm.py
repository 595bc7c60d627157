"""Batch scripts for Slurm, and what they share with launch scripts for machines without a scheduler.

The scripts are files in support/cluster/templates. `@include NAME@` stands for another template,
and `@NAME@` for a value; bash uses $. `python -m support.cluster.slurm` writes `slurm/*.slurm`,
which are these templates with default values. `scripts/distributed_setup.py` fills them in with a
user's choices.
"""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent

TEMPLATES = Path(__file__).parent / "templates"
REQUEUE_LINES = [
    "#SBATCH --requeue",
    "#SBATCH --open-mode=append                # one log for all turns",
    "#SBATCH --signal=USR1@120                 "
    "# EDIT: seconds for the step that runs, and the save",
]
SITE_LINES = [
    "##SBATCH --partition=gpu                # EDIT: one # less where your site wants it",
    "##SBATCH --account=my-project           # EDIT",
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
    """Return a template with every @NAME@ replaced by its value; a value is not searched for more.

    Args:
        template: name of the template.
        values: {NAME: value}; values are converted to text.
    Raises:
        KeyError: a placeholder has no value.
    """
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

    Args:
        argv: arguments of the training script.
    """
    from support.cli.flags import build_parser
    from support.cli.run_file import read_run_file
    from support.errors import UserError

    parser = build_parser()
    try:
        if file := parser.parse_known_args(argv)[0].config:
            argv = [*read_run_file(file, parser), *argv]
        return parser.parse_known_args(argv)[0].output_dir or ""
    except UserError:
        return ""


def examples() -> dict[str, str]:
    """Return the example batch scripts of the folder slurm/ as {file name: text}."""
    several_nodes = {"NODES": 2}
    tasks_per_gpu = {"NODES": 2, "TASKS": 4, "CPUS": 2}
    rows = [
        (
            "train_single_node.slurm",
            "One node, a launcher that starts a rank for each of its GPUs.",
            "job_torchrun_one_node",
            {},
        ),
        (
            "train_multi_node.slurm",
            "Several nodes: torchrun once on each, ranks for all GPUs.",
            "job_torchrun",
            several_nodes,
        ),
        (
            "train_srun.slurm",
            "One Slurm task for each GPU, and no launcher.",
            "job_srun",
            tasks_per_gpu,
        ),
        (
            "train_requeue.slurm",
            "A run longer than a job may be: saved before the time limit or on preemption, "
            "requeued, resumed by itself.",
            "job_requeue",
            {**tasks_per_gpu, "sbatch": [*REQUEUE_LINES, *SITE_LINES], "arguments": " --resume"},
        ),
    ]
    texts = {}
    for file, summary, template, values in rows:
        about = (
            f"{summary}\n\n    sbatch slurm/{file}      # the embedded model\n"
            f"    sbatch slurm/{file} --model gpt2 --strategy zero2"
            "      # further arguments are the script's"
        )
        texts[file] = batch_script(template, about, **{"sbatch": SITE_LINES, **values})
    texts["compare.slurm"] = batch_script(
        "job_compare",
        "Compare all strategies on one node; tables and figure go to the folder of sbatch.\n\n"
        "    sbatch slurm/compare.slurm                              # the embedded model\n"
        "    sbatch slurm/compare.slurm gpt2-medium --batch_size 2"
        "   # further arguments are compare_strategies.sh's",
        SITE_LINES,
        NAME="compare",
    )
    return texts


if __name__ == "__main__":
    from support import PROJECT

    for _name, _text in examples().items():
        (PROJECT / "slurm" / _name).write_text(_text)
