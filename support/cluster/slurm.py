"""Templates of batch scripts for Slurm and of launch scripts for machines without a scheduler.

`python -m support.cluster.slurm` writes `slurm/*.slurm`, which are these templates with default
values. `scripts/distributed_setup.py` fills them in with a user's choices. Placeholders have the
form @NAME@, because bash uses $.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from textwrap import indent

HEADER = """\
#!/usr/bin/env bash
@ABOUT@
#
# Lines marked EDIT are about your site. #SBATCH lines are read before bash runs: no variables in
# them, no space after the #, and nothing after the first command.
#
#SBATCH --job-name=@NAME@
#SBATCH --nodes=@NODES@
#SBATCH --ntasks-per-node=@TASKS@@TASKS_NOTE@
#SBATCH --gpus-per-node=@GPUS@            # EDIT: without GPUs take the line out; the ranks are then CPU processes
#SBATCH --cpus-per-task=@CPUS@            # EDIT
#SBATCH --time=@TIME@           # EDIT
#SBATCH --output=%x-%j.out
#SBATCH --error=%x-%j.err
@MORE_SBATCH@
set -euo pipefail
"""

# Sets the project's folder and the Python environment, in every job.
ENVIRONMENT = """\
@PROJECT_LINE@
@MODULES@
# The environment that was active at sbatch is used; without one, .venv in the project.
@ACTIVATE@
"""

PROJECT_OF_EXAMPLES = """\
# Slurm runs a copy of this file, so $0 does not lead to the project; the job's record has its path.
file=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p') || true
# The record has a line for each job of an array, and the job's arguments after the path.
file=${file%%$'\\n'*} file=${file%%.slurm *}
project=${TRAINING_PROJECT:-$(cd "$(dirname "$file")/.." && pwd)}
if [[ ! -f $project/real_model_example.py ]]; then
    echo "❌ $project is not the project: submit slurm/*.slurm from it, or export TRAINING_PROJECT." >&2
    exit 2
fi"""

ACTIVATE_ANY = """\
if [[ -z ${VIRTUAL_ENV-}${CONDA_PREFIX-} && -d $project/.venv ]]; then export PATH="$project/.venv/bin:$PATH"; fi"""

FACTS = """\
# The list of nodes is compressed ("gpu[07-08]"): only scontrol can expand it.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# Jobs that share a node get different ports.
export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# What the job has on each node, whether requested with --gpus-per-node, --gres, --gpus or otherwise.
gpus=${SLURM_GPUS_ON_NODE:-0}
cores=$(tr ',' '\\n' <<< "$SLURM_JOB_CPUS_PER_NODE" | sort -n | sed -n '1{s/(.*//;p}') # of the smallest node
total=${SLURM_GPUS:-$((gpus * ${#hosts[@]}))}
if ((${total##*:} != gpus * ${#hosts[@]})); then
    echo "❌ $total GPUs cannot be spread evenly over ${#hosts[@]} nodes: use --gpus-per-node instead of --gpus." >&2
    exit 2
fi
@RANKS_LINE@
echo "Job $SLURM_JOB_ID on ${#hosts[@]} nodes: $SLURM_JOB_NODELIST; on each node $gpus GPUs, $cores cores"
echo "Ranks: $((ranks * ${#hosts[@]})) ($ranks on each node); Master: $MASTER_ADDR:$MASTER_PORT"
"""

RANKS_OF_LAUNCHER = """\
ranks=$((gpus > 0 ? gpus : 2)) # one rank for each GPU; without GPUs two CPU processes"""

RANKS_OF_SRUN = """\
ranks=$((gpus > 0 ? gpus : ${SLURM_NTASKS_PER_NODE:-1})) # one task for each GPU; without GPUs as many as requested
if ((ranks > cores)); then
    echo "❌ $ranks ranks need $ranks cores on each node, and the job has $cores: use a larger --cpus-per-task." >&2
    exit 2
fi"""

ONE_NODE_ONLY = """\
if ((${#hosts[@]} > 1)); then
    echo "❌ This script is for one node, and the job has ${#hosts[@]}: submit slurm/train_multi_node.slurm." >&2
    exit 2
fi"""

# srun reads the options of sbatch from the environment, and rejects them if they contradict what
# the job has been granted.
STEP = """\
# --kill-on-bad-exit: one rank's failure ends all. --export=ALL: a site's default may be NONE. What
# the step gets is stated here; the variables of sbatch's options would contradict it.
unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_GPU_BIND
unset SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK
step=(srun --kill-on-bad-exit=1 --wait=60 --export=ALL --nodes="${#hosts[@]}")
if ((gpus > 0)); then step+=(--gres="gpu:$gpus"); fi"""

ONE_TASK_A_NODE = """\
step+=(--ntasks="${#hosts[@]}" --ntasks-per-node=1 --cpus-per-task="$cores")"""

TORCHRUN = """\
@STEP@
@ONE_TASK_A_NODE@
# torchrun passes these signals to its ranks; without the line (torch 2.9 reads it) SIGUSR1 kills it.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1
# With c10d no node needs a number; $SLURM_NODEID would be expanded here, to 0 for all of them.
"${step[@]}" torchrun \\
    --nnodes="${#hosts[@]}" --nproc_per_node="$ranks" \\
    --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" \\
    --rdzv_id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\
    @SCRIPT@"""

TORCHRUN_ONE_NODE = """\
@ONE_NODE_ONLY@
# LAUNCHER=deepspeed sbatch … uses DeepSpeed's launcher: in the batch shell and never under srun, where
# every task would start all ranks. Signals do not reach its ranks: a time limit loses what is after
# the last checkpoint.
if [[ ${LAUNCHER:-torchrun} == deepspeed ]]; then
    @GPUS_OF_DEEPSPEED@
    deepspeed "${which[@]}" --master_port="$MASTER_PORT" @SCRIPT@
    exit
fi
@STEP@
@ONE_TASK_A_NODE@
# torchrun passes these signals to its ranks; without the line (torch 2.9 reads it) SIGUSR1 kills it.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1
"${step[@]}" torchrun --nnodes=1 --nproc_per_node="$ranks" --master_port="$MASTER_PORT" \\
    @SCRIPT@"""

DEEPSPEED = """\
@ONE_NODE_ONLY@
# DeepSpeed's launcher in the batch shell and never under srun, where every task would start all
# ranks. Signals do not reach its ranks: a time limit loses what is after the last checkpoint.
@GPUS_OF_DEEPSPEED@
deepspeed "${which[@]}" --master_port="$MASTER_PORT" @SCRIPT@"""

# With --num_gpus DeepSpeed ignores which GPUs were granted, and uses the first ones of the node.
GPUS_OF_DEEPSPEED = """\
which=(--num_gpus="@RANKS@")
if command -v nvidia-smi > /dev/null && [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
    which=(--include="localhost:$CUDA_VISIBLE_DEVICES")
fi"""

PLAIN_SRUN = """\
@STEP@
# No launcher: srun starts one task for each GPU, and the script reads its rank from SLURM_PROCID.
# Every task sees all GPUs of its node: with its own alone a rank cannot talk to the others directly.
step+=(--ntasks="$((ranks * ${#hosts[@]}))" --ntasks-per-node="$ranks" --cpus-per-task="$((cores / ranks))")
"${step[@]}" python @SCRIPT@"""

REQUEUE = """\
# Signals go to the ranks (--signal without B:, which would warn this shell alone). They save and end
# with status "preempted"; then the job is queued again, and --resume continues. A run that fails is
# not repeated: if that happens before it trains, the results of the run before are unchanged.
status() {
    python -I -c 'import json, sys; print(json.load(sys.stdin)["status"])' 2> /dev/null < "$output/results.json"
}
before=$(cksum 2> /dev/null < "$output/results.json") || true
code=0
@PLAIN_SRUN@ || code=$?
if [[ $(status) == preempted && $(cksum < "$output/results.json") != "$before" ]]; then
    echo "Stopped and saved: requeued (start $((${SLURM_RESTART_COUNT:-0} + 1)))"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60 # the requeue ends this shell
    echo "❌ The job could not be requeued: submit it again with --output_dir $output." >&2
fi
exit "$code\""""

OUTPUT = """\
# The folder that the arguments name, or the run file among them; otherwise one named after the job.
output=$(python -c 'import sys; sys.path[0] = sys.argv.pop(1)
from support.cluster.slurm import output_dir; print(output_dir(sys.argv[1:]))' "$project"@ARGUMENTS@ "$@")
output=${output:-runs/${SLURM_JOB_NAME//\\//_}-$SLURM_JOB_ID}"""

COMPARE = """\
@ONE_NODE_ONLY@
if command -v nvidia-smi > /dev/null; then export NUM_GPUS=$ranks; fi # without GPUs two CPU processes
bash "$project/compare_strategies.sh" "$@\""""


@dataclass
class Job:
    """Values of a batch script's placeholders.

    Attributes:
        about: the first comment lines of the file, with the command that submits it.
        name: name of the job.
        launch: template of the last part, which starts the ranks.
        nodes: number of nodes.
        gpus: GPUs per node.
        cpus: cores per task.
        time: time limit in Slurm's format, such as "02:00:00".
        tasks_per_node: 1 if a launcher starts the ranks, otherwise one per GPU.
        sbatch: further #SBATCH lines.
        project: shell lines that set $project.
        modules: shell lines that load the site's modules.
        activate: shell lines that select the Python environment.
        arguments: arguments of the training script, before those of the job; empty, or starting
            with a space.
    """

    about: str
    name: str
    launch: str
    nodes: int = 1
    gpus: int = 4
    cpus: int = 8
    time: str = "02:00:00"
    tasks_per_node: int = 1
    sbatch: list[str] = field(default_factory=list)
    project: str = PROJECT_OF_EXAMPLES
    modules: str = "# module load cuda/12.4 gcc/12                            # EDIT"
    activate: str = ACTIVATE_ANY
    arguments: str = ""

    def text(self) -> str:
        """Return the text of the batch script."""
        by_srun = self.launch in (PLAIN_SRUN, REQUEUE)
        layout = [
            HEADER,
            ENVIRONMENT,
            FACTS,
            *([] if self.launch == COMPARE else [OUTPUT]),
            self.launch,
        ]
        template = "\n".join(layout)
        for name, part in {
            "PLAIN_SRUN": PLAIN_SRUN,
            "STEP": STEP,
            "ONE_NODE_ONLY": ONE_NODE_ONLY,
            "ONE_TASK_A_NODE": ONE_TASK_A_NODE,
            "GPUS_OF_DEEPSPEED": GPUS_OF_DEEPSPEED,
            "RANKS_LINE": RANKS_OF_SRUN if by_srun else RANKS_OF_LAUNCHER,
        }.items():
            template = re.sub(
                f"^( *)@{name}@",
                lambda found, part=part: indent(part, found[1]),
                template,
                flags=re.MULTILINE,
            )
        return (
            fill(
                template,
                {
                    "ABOUT": "\n".join(
                        f"# {line}".rstrip() for line in self.about.strip().splitlines()
                    ),
                    "NAME": self.name,
                    "NODES": self.nodes,
                    "GPUS": self.gpus,
                    "CPUS": self.cpus,
                    "TIME": self.time,
                    "TASKS": self.tasks_per_node,
                    "TASKS_NOTE": "          # EDIT: as many as GPUs"
                    if self.tasks_per_node > 1
                    else "",
                    "RANKS": "$ranks",
                    "MORE_SBATCH": "\n".join(self.sbatch),
                    "PROJECT_LINE": self.project,
                    "MODULES": self.modules,
                    "ACTIVATE": self.activate,
                    "ARGUMENTS": self.arguments,
                    "SCRIPT": '"$project/real_model_example.py" --output_dir "$output"'
                    f'{self.arguments} "$@"',
                },
            )
            + "\n"
        )


def fill(template: str, values: dict) -> str:
    """Replace every @NAME@ by its value, and shorten runs of empty lines in the template to one.

    Placeholders inside a value are not replaced.

    Args:
        template: text with placeholders.
        values: {NAME: value}; values are converted to text.
    Raises:
        KeyError: a placeholder has no value.
    """
    template = re.sub(r"\n\n\n+", "\n\n", template)
    return re.sub(r"@([A-Z_]+)@", lambda found: str(values[found[1]]), template)


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


def examples() -> dict[str, str]:
    """Return the example batch scripts of the folder slurm/ as {file name: text}."""

    def about(what: str, file: str) -> str:
        return (
            f"{what}\n\n    sbatch slurm/{file}      # the embedded model\n"
            f"    sbatch slurm/{file} --model gpt2 --strategy zero2"
            "      # further arguments are the script's"
        )

    jobs = {
        "train_single_node.slurm": Job(
            about(
                "One node, a launcher that starts a rank for each of its GPUs.",
                "train_single_node.slurm",
            ),
            "train",
            TORCHRUN_ONE_NODE,
        ),
        "train_multi_node.slurm": Job(
            about(
                "Several nodes: torchrun once on each, ranks for all GPUs.",
                "train_multi_node.slurm",
            ),
            "train",
            TORCHRUN,
            nodes=2,
        ),
        "train_srun.slurm": Job(
            about("One Slurm task for each GPU, and no launcher.", "train_srun.slurm"),
            "train",
            PLAIN_SRUN,
            nodes=2,
            tasks_per_node=4,
            cpus=2,
        ),
        "compare.slurm": Job(
            "Compare all strategies on one node; tables and figure go to the folder of sbatch.\n\n"
            "    sbatch slurm/compare.slurm                              # the embedded model\n"
            "    sbatch slurm/compare.slurm gpt2-medium --batch_size 2"
            "   # further arguments are compare_strategies.sh's",
            "compare",
            COMPARE,
        ),
    }
    jobs["train_requeue.slurm"] = Job(
        about(
            "A run longer than a job may be: saved before the time limit or on preemption, "
            "requeued, resumed by itself.",
            "train_requeue.slurm",
        ),
        "train",
        REQUEUE,
        nodes=2,
        tasks_per_node=4,
        cpus=2,
        sbatch=REQUEUE_LINES,
        arguments=" --resume",
    )
    for job in jobs.values():
        job.sbatch = [*job.sbatch, *SITE_LINES]
    return {name: job.text() for name, job in jobs.items()}


# ------------------------------------------------------------------------------ without a scheduler

LAUNCH_HEADER = """\
#!/usr/bin/env bash
# Made by:
#     @MADE_BY@
# Further arguments are those of real_model_example.py.
@DIGEST@
set -euo pipefail
project=@PROJECT@
@ACTIVATE@
"""

ONE_MACHINE = f"""\
{LAUNCH_HEADER}
{GPUS_OF_DEEPSPEED}
exec deepspeed "${{which[@]}}" --master_port=@MASTER_PORT@ "$project/real_model_example.py" --config @CONFIG@ "$@"
"""

EACH_MACHINE = f"""\
{LAUNCH_HEADER}
# Run it on each machine with its number: NODE_RANK=0 on @MASTER_ADDR@, then 1, 2, …
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1,SIGHUP
exec torchrun --nnodes=@NODES@ --nproc_per_node=@RANKS@ --node_rank="${{NODE_RANK:-@NODE_RANK@}}" \\
    --master_addr=@MASTER_ADDR@ --master_port=@MASTER_PORT@ \\
    "$project/real_model_example.py" --config @CONFIG@ "$@"
"""

OVER_SSH = (
    f"""\
{LAUNCH_HEADER}
# Starts a run on all hosts over ssh, from one of them or from any machine. The project, its environment and
# the run file are at the same place on each, and ssh asks for no password (ssh-copy-id). SSH is the command,
# for example SSH="ssh -p 2222".
hosts=(@HOSTS@)
torchrun=$(command -v torchrun)
read -ra ssh <<< "${{SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}}"
# What the other hosts get of this shell's settings, HF_TOKEN and WANDB_API_KEY among them.
settings=("PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1")
forwarded='^(NCCL|GLOO|HF|OMP|WANDB)_|^TORCH_EXTENSIONS_DIR$'
for name in $(compgen -e | grep -E "$forwarded"); do settings+=("$name=${{!name}}"); done
"""
    + r"""
# All goes to the other host on standard input: a command line is shown by `ps` to every user of both hosts.
remote() { # $1: number of the host; the rest: arguments of the script
    printf '{ export%s\n' "$(printf ' %q' "${settings[@]}")"
    printf 'cd %q || exit\nexec 3<&0\n' "$PWD"
    printf '%q ' "$torchrun" --nnodes=@NODES@ --nproc_per_node=@RANKS@ --node_rank="$1" --master_addr=@MASTER_ADDR@ \
        --master_port=@MASTER_PORT@ "$project/real_model_example.py" --config @CONFIG@ "${@:2}"
    # shellcheck disable=SC2016 # the other host expands it
    printf '%s\n' '< /dev/null 3<&- &
run=$!
# Standard input ends when this connection does, for whatever reason: then the ranks save and end.
{ while read -r _ <&3; do :; done; kill "$run"; } 2> /dev/null &
watch=$! code=0
wait "$run" || code=$?
kill "$watch" 2> /dev/null
exit "$code"; }'
}
pids=() open=() writers=() folder=$(mktemp -d)
# The connections' inputs end first, so that what the ranks print until they have saved is shown.
# shellcheck disable=SC2329 # the trap calls it
stop() {
    kill -KILL "${writers[@]}" 2> /dev/null || true
    for held in "${open[@]}"; do exec {held}>&-; done
    for ((tenths = 0; tenths < 450; tenths++)); do
        kill -0 "${pids[@]}" 2> /dev/null || break
        sleep 0.1
    done
    kill "${pids[@]}" 2> /dev/null || true
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM
for number in "${!hosts[@]}"; do
    mkfifo "$folder/$number"
    exec {input}<> "$folder/$number" # held open by this shell alone: each connection ends with it
    open+=("$input")
    (
        trap '' INT # Ctrl-C is for this shell alone
        for held in "${open[@]}"; do exec {held}>&-; done
        exec "${ssh[@]}" "${hosts[number]}" bash -s < "$folder/$number" > >(sed -u "s/^/${hosts[number]}: /") 2>&1
    ) &
    pids+=($!)
    remote "$number" "$@" >&"${open[number]}" & # not here: where ssh has failed, nobody reads
    writers+=($!)
    disown # it is not one of those to wait for
done
# The first host that fails ends all; its messages are above.
code=0
for _ in "${hosts[@]}"; do
    wait -n || { code=$?; break; }
done
exit "$code"
"""
)


if __name__ == "__main__":
    from support.cli.flags import PROJECT

    for _name, _text in examples().items():
        (PROJECT / "slurm" / _name).write_text(_text)
