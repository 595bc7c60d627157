"""Batch scripts for Slurm and launch scripts for machines without it, from one set of templates.

`slurm/*.slurm` are these templates with their defaults (`python -m support.jobs` writes them again), and
`scripts/distributed_setup.py slurm` fills them in with a user's choices. Placeholders are written @NAME@, because $ is bash's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

HEADER = """\
#!/usr/bin/env bash
@ABOUT@
#
# Lines marked EDIT are about your site. #SBATCH lines are read before bash runs: no variables in them, no space after the #,
# and nothing after the first command.
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

# Where the project is, and which Python: the same for every job.
ENVIRONMENT = """\
@PROJECT_LINE@
@MODULES@
# The environment that was active at sbatch came along; without one, the .venv beside the project.
@ACTIVATE@
"""

PROJECT_OF_EXAMPLES = """\
# Slurm runs a copy of this file, so $0 does not lead to the project; the job's record knows where the file was.
file=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\\(.*\\.slurm\\).*/\\1/p')
project=${TRAINING_PROJECT:-$(cd "$(dirname "$file")/.." && pwd)}
if [[ ! -f $project/real_model_example.py ]]; then
    echo "❌ $project is not the project: submit slurm/*.slurm from it, or export TRAINING_PROJECT." >&2
    exit 2
fi"""

ACTIVATE_ANY = """\
if [[ -z ${VIRTUAL_ENV-}${CONDA_PREFIX-} && -d $project/.venv ]]; then export PATH="$project/.venv/bin:$PATH"; fi"""

RANKS = """\
# One rank a GPU; where there is no CUDA they are CPU processes.
ranks=${SLURM_GPUS_ON_NODE:-2}
"""

FACTS = """\
# The list of nodes is compressed ("gpu[07-08]"): only scontrol can expand it. mapfile, because `| head` breaks pipefail.
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node get different ports
echo "Job $SLURM_JOB_ID on ${#hosts[@]} nodes: $SLURM_JOB_NODELIST; GPUs on each: ${SLURM_GPUS_ON_NODE:-0}"
echo "Master: $MASTER_ADDR:$MASTER_PORT"
"""

SRUN = """srun --kill-on-bad-exit=1 --wait=60 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}\""""

SRUN_NOTES = """\
# --kill-on-bad-exit: one rank's failure ends all. --cpus-per-task: since Slurm 22.05 srun does not take it from the job."""

TORCHRUN = """\
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1 # torchrun passes these on; of SIGUSR1 it would die (torch 2.9 and newer)
# $SLURM_NODEID would be expanded here, on the first node, for all of
# them: with c10d no node needs a number, they agree on one.
@SRUN@ torchrun \\
    --nnodes="${#hosts[@]}" --nproc_per_node="$ranks" \\
    --rdzv_backend=c10d --rdzv_endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv_id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \\
    @SCRIPT@"""

TORCHRUN_ONE_NODE = """\
# LAUNCHER=deepspeed sbatch … takes DeepSpeed's launcher instead: here in the batch shell and never under srun, where every task
# would start all ranks. A signal does not reach its ranks, so time limits cost what is not saved.
if [[ ${LAUNCHER:-torchrun} == deepspeed ]]; then
    @GPUS_OF_DEEPSPEED@
    deepspeed "${gpus[@]}" --master_port="$MASTER_PORT" @SCRIPT@
else # torchrun passes these on; of SIGUSR1 it would die (torch 2.9 and newer)
    export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1
    @SRUN@ torchrun \\
        --nnodes=1 --nproc_per_node="$ranks" --master_port="$MASTER_PORT" @SCRIPT@
fi"""

DEEPSPEED = """\
# DeepSpeed's launcher in the batch shell, never under srun, where every task would start all ranks. A signal does not reach its
# ranks, so a time limit costs what is not saved.
@GPUS_OF_DEEPSPEED@
deepspeed "${gpus[@]}" --master_port="$MASTER_PORT" @SCRIPT@"""

# With --num_gpus DeepSpeed forgets which GPUs were granted and takes the first ones.
GPUS_OF_DEEPSPEED = """\
gpus=(--num_gpus="@RANKS@")
if command -v nvidia-smi > /dev/null && [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
    gpus=(--include="localhost:$CUDA_VISIBLE_DEVICES")
fi"""

PLAIN_SRUN = """\
if [[ ${SLURM_GPUS_ON_NODE:-$SLURM_NTASKS_PER_NODE} != "$SLURM_NTASKS_PER_NODE" ]]; then
    echo "❌ $SLURM_GPUS_ON_NODE GPUs a node, $SLURM_NTASKS_PER_NODE tasks: let --ntasks-per-node be as --gpus-per-node." >&2
    exit 2
fi
# No launcher: srun starts one task a GPU, and the script reads its rank from SLURM_PROCID. No --gpus-per-task: a rank that sees
# only its own GPU cannot talk to its neighbours directly.
@SRUN@ \\
    python @SCRIPT@"""

REQUEUE = """\
for ((i = 1; i < $#; i++)); do
    [[ ${!i} != --output_dir ]] || { next=$((i + 1)) && output=${!next}; }
done
cp "$output/results.json" "$output/.results.before" 2> /dev/null || true # a turn that fails before it trains leaves it as it is
# Signals go to the ranks (--signal without B:, which would warn this shell alone). They save and end; then the job asks for its
# next turn, in which --resume goes on. A run that fails is not repeated.
code=0
@LAUNCH@ || code=$?
if grep -q '"status": "preempted"' "$output/results.json" && ! cmp -s "$output/results.json" "$output/.results.before"; then
    echo "Stopped and saved: requeued (start $((${SLURM_RESTART_COUNT:-0} + 1)))"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # the requeue ends this shell
fi
exit "$code\""""

COMPARE = """\
if command -v nvidia-smi > /dev/null; then export NUM_GPUS=$ranks; fi # without GPUs two CPU processes
bash "$project/compare_strategies.sh" "$@\""""


@dataclass
class Job:
    """What fills the templates.

    Attributes:
        about: the file's first comment lines, with the command that submits it.
        name: of the job.
        launch: the template of the last part.
        nodes, gpus, cpus, time: of the allocation; `cpus` per task.
        tasks_per_node: 1 where a launcher starts the ranks, else one a GPU.
        sbatch: further #SBATCH lines.
        project: shell lines that set $project.
        modules: lines that load the site's modules.
        activate: lines that choose the Python environment.
        arguments: of the script, before the job's own.
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
    output: str = "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID"

    def text(self) -> str:
        """The batch script."""
        script = f'"$project/real_model_example.py" --output_dir "$output"{self.arguments} "$@"'
        output = f"output={self.output}\n" if self.launch != COMPARE else ""
        launch = f"{SRUN_NOTES}\n{self.launch}" if "@SRUN@" in self.launch else self.launch
        counted_here = "$ranks" in launch or "@GPUS_OF_DEEPSPEED@" in launch  # srun's own tasks are counted by #SBATCH
        ranks = RANKS if counted_here else ""
        parts = [HEADER, ENVIRONMENT, ranks + FACTS + output, launch]
        return fill("\n".join(parts), {
            "ABOUT": "\n".join(f"# {line}".rstrip() for line in self.about.strip().splitlines()), "NAME": self.name,
            "NODES": self.nodes, "GPUS": self.gpus, "CPUS": self.cpus, "TIME": self.time, "TASKS": self.tasks_per_node,
            "TASKS_NOTE": "          # EDIT: as many as GPUs" if self.tasks_per_node > 1 else "",
            "GPUS_OF_DEEPSPEED": GPUS_OF_DEEPSPEED, "RANKS": "$ranks",
            "MORE_SBATCH": "\n".join(self.sbatch), "PROJECT_LINE": self.project, "MODULES": self.modules,
            "ACTIVATE": self.activate, "SRUN": SRUN, "SCRIPT": script,
        }) + "\n"  # fmt: skip


def fill(template: str, values: dict) -> str:
    """Replace every @NAME@; values may hold placeholders themselves.

    Raises:
        KeyError: a placeholder without a value.
    """
    while re.search(r"@[A-Z_]+@", template):
        template = re.sub(r"@([A-Z_]+)@", lambda found: str(values[found[1]]), template)
    return re.sub(r"\n\n\n+", "\n\n", template)


REQUEUE_LINES = ["#SBATCH --requeue", "#SBATCH --open-mode=append                # one log for all turns",
                 "#SBATCH --signal=USR1@120                 # EDIT: seconds for the step that runs, and the save"]  # fmt: skip
SITE_LINES = ["##SBATCH --partition=gpu                # EDIT: one # less where your site wants it",
              "##SBATCH --account=my-project           # EDIT"]  # fmt: skip


def examples() -> dict[str, str]:
    """The files of slurm/: {name: text}."""
    def about(what: str, file: str) -> str:
        return (f"{what}\n\n    sbatch slurm/{file}      # the embedded model\n"
                f"    sbatch slurm/{file} --model gpt2 --strategy zero2      # arguments go on to the script")  # fmt: skip

    requeue = REQUEUE.replace("@LAUNCH@", PLAIN_SRUN)
    jobs = {
        "train_single_node.slurm": Job(about("One node, a launcher that starts a rank for each of its GPUs.",
                                             "train_single_node.slurm"), "train", TORCHRUN_ONE_NODE),
        "train_multi_node.slurm": Job(about("Several nodes: torchrun once on each, ranks for all GPUs.",
                                            "train_multi_node.slurm"), "train", TORCHRUN, nodes=2),
        "train_srun.slurm": Job(about("One Slurm task for each GPU, and no launcher.", "train_srun.slurm"), "train",
                                PLAIN_SRUN, nodes=2, tasks_per_node=4, cpus=2),
        "compare.slurm": Job(
            "Compare all strategies on one node; tables and figure go to the folder of sbatch.\n\n"
            "    sbatch slurm/compare.slurm                              # the embedded model\n"
            "    sbatch slurm/compare.slurm gpt2-medium --batch_size 2   # arguments go on to compare_strategies.sh",
            "compare", COMPARE),
    }  # fmt: skip
    jobs["train_requeue.slurm"] = Job(
        about("A run longer than a job may be: saved before the time limit or on preemption, requeued, resumed by itself.",
              "train_requeue.slurm"), "train", requeue, nodes=2, tasks_per_node=4, cpus=2,
        sbatch=REQUEUE_LINES, arguments=" --resume",
    )  # fmt: skip
    for job in jobs.values():
        job.sbatch = [*job.sbatch, *SITE_LINES]
    return {name: job.text() for name, job in jobs.items()}


# ------------------------------------------------------------------------------------------------ without a scheduler

LAUNCH_HEADER = """\
#!/usr/bin/env bash
# Made by:
#     @MADE_BY@
# Further arguments go on to real_model_example.py.
set -euo pipefail
project=@PROJECT@
@ACTIVATE@
"""

ONE_MACHINE = LAUNCH_HEADER + """\
@GPUS_OF_DEEPSPEED@
exec deepspeed "${gpus[@]}" --master_port=@MASTER_PORT@ "$project/real_model_example.py" --config @CONFIG@ "$@"
"""

EACH_MACHINE = LAUNCH_HEADER + """\
# Run it on each machine with its number: NODE_RANK=0 on @MASTER_ADDR@, then 1, 2, …
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1,SIGHUP
exec torchrun --nnodes=@NODES@ --nproc_per_node=@GPUS@ --node_rank="${NODE_RANK:-@NODE_RANK@}" \\
    --master_addr=@MASTER_ADDR@ --master_port=@MASTER_PORT@ \\
    "$project/real_model_example.py" --config @CONFIG@ "$@"
"""

OVER_SSH = """\
#!/usr/bin/env bash
# Made by:
#     @MADE_BY@
# Starts a run on all hosts over ssh, from one of them or from any machine. The project, its environment and the run file are at
# the same place on each, and ssh asks for no password (ssh-copy-id). Further arguments go on to real_model_example.py.
# SSH: the command, for example SSH="ssh -p 2222".
set -euo pipefail
project=@PROJECT@
@ACTIVATE@
torchrun=$(command -v torchrun)
hosts=(@HOSTS@)
read -ra ssh <<< "${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}"
pids=()
# With a terminal (-tt) the far side ends when this script does: sshd hangs up on it.
stop() { kill "${pids[@]}" 2> /dev/null || true; }
trap stop EXIT
trap 'exit 130' INT TERM
# What the other hosts are to know of this shell's settings.
settings=(PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR1,SIGHUP)
for name in $(compgen -e | grep -E '^(NCCL|GLOO|HF|OMP)_|^TORCH_EXTENSIONS_DIR$'); do settings+=("$name=${!name}"); done
for number in "${!hosts[@]}"; do
    command=(env "${settings[@]}" "$torchrun" --nnodes=@NODES@ --nproc_per_node=@GPUS@ --node_rank="$number"
        --master_addr=@MASTER_ADDR@ --master_port=@MASTER_PORT@ "$project/real_model_example.py" --config @CONFIG@ "$@")
    far="cd $(printf %q "$PWD") && exec$(printf ' %q' "${command[@]}")" # quoted for the shell over there
    "${ssh[@]}" -tt "${hosts[number]}" "$far" < /dev/null > >(sed -u "s/^/${hosts[number]}: /") 2>&1 &
    pids+=($!)
done
# The first host that fails ends all; its messages are above.
code=0
for _ in "${hosts[@]}"; do
    wait -n || { code=$?; break; }
done
exit "$code"
"""


if __name__ == "__main__":
    for _name, _text in examples().items():
        (Path(__file__).parent.parent / "slurm" / _name).write_text(_text)
