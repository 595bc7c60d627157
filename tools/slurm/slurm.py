"""Batch scripts for Slurm and launch scripts, from the jinja2 templates in tools/slurm/templates.

`python -m tools.slurm.slurm` writes `slurm/*.slurm`, which are the template with default values.
`scripts/distributed_setup.py` fills it in with a user's choices.
"""

from pathlib import Path

from distributed_training import PROJECT
from distributed_training.ranks.time_limit import SIGNAL_SECONDS

SITE_LINES = [
    "##SBATCH --partition=gpu                # EDIT: remove one # if your site requires it",
    "##SBATCH --account=my-project           # EDIT",
]
ACTIVATE = (
    "if [[ -z ${VIRTUAL_ENV-}${CONDA_PREFIX-} && -d $project/.venv ]]; "
    'then export PATH="$project/.venv/bin:$PATH"; fi'
)
DEFAULTS = {
    "name": "train",
    "nodes": 1,
    "tasks": 1,
    "gpus": 4,
    "cpus": 8,
    "time": "02:00:00",
    "project": "",
    "modules": "",
    "activate": ACTIVATE,
    "sbatch": SITE_LINES,
    "signal_seconds": SIGNAL_SECONDS,
    "launcher": "torchrun",
}
PER_GPU = {"nodes": 2, "tasks": 4, "cpus": 2}
# (file, kind, what it is for, values other than DEFAULTS); see `batch_script`.
EXAMPLES: tuple[tuple[str, str, str, dict], ...] = (
    ("train_single_node", "one_node", "One node: torchrun starts one rank per GPU.", {}),
    (
        "train_multi_node",
        "torchrun",
        "Several nodes: torchrun, once on each node, starts one rank per GPU.",
        {"nodes": 2},
    ),
    ("train_srun", "srun", "One Slurm task per GPU, without a launcher.", PER_GPU),
    (
        "train_requeue",
        "requeue",
        "A run longer than a job's time limit: it is saved before the limit or on preemption,\n"
        "requeued and resumed.",
        {**PER_GPU, "arguments": " --resume"},
    ),
    (
        "compare",
        "compare",
        "Compare all strategies on one node; tables and figure are written to the folder of sbatch.",
        {"name": "compare"},
    ),
)


def fill(template: str, **values: object) -> str:
    """Return the text of templates/`template`.jinja with these values."""
    import jinja2  # only for the generator: plan_memory.py must start quickly

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        comment_start_string="<#",  # {# is also a part of bash's ${#hosts[@]}
        comment_end_string="#>",
    )
    return environment.get_template(f"{template}.jinja").render(values)


def batch_script(kind: str, about: str, arguments: str = "", **values: object) -> str:
    """Return the text of a batch script.

    Args:
        kind: what starts the ranks: "one_node" (torchrun or deepspeed), "torchrun", "srun",
            "requeue" (srun), or "compare" (all strategies).
        about: the first comment lines of the file, with the command that submits it.
        arguments: arguments of the training script, before those of the job; empty, or starting
            with a space.
        values: other values than DEFAULTS. `cpus` is the number of cores per task, `tasks` the
            number of tasks per node: 1 if a launcher starts the ranks, otherwise one per GPU.
            `project`, `modules` and `activate` are shell text; `sbatch` further lines.
    """
    comment = "\n".join(f"# {line}".rstrip() for line in about.splitlines())
    script = f'"$project/real_model_example.py" --output_dir "$output"{arguments} "$@"'
    fixed = {"kind": kind, "about": comment, "arguments": arguments, "script": script}
    return fill("slurm", **{**DEFAULTS, **values, **fixed})


def examples() -> dict[str, str]:
    """Return the example batch scripts of the folder slurm/ as {file name: text}."""
    texts = {}
    for name, kind, summary, values in EXAMPLES:
        script, more = "real_model_example.py", "--model gpt2 --strategy zero2"
        if kind == "compare":
            script, more = "compare_strategies.sh", "gpt2-medium --batch_size 2"
        about = (
            f"{summary}\nFurther arguments are those of {script}.\n\n"
            f"    sbatch slurm/{name}.slurm      # the embedded model\n"
            f"    sbatch slurm/{name}.slurm {more}"
        )
        texts[f"{name}.slurm"] = batch_script(kind, about, **values)
    return texts


if __name__ == "__main__":
    for _name, _text in examples().items():
        (PROJECT / "slurm" / _name).write_text(_text)
