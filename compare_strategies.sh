#!/usr/bin/env bash
# Train one model under every strategy, on the same work, and compare memory, speed and losses.
#
#   bash compare_strategies.sh                          # the embedded model: a few minutes on a laptop
#   bash compare_strategies.sh gpt2-medium              # on all GPUs of this node
#   bash compare_strategies.sh gpt2 --batch_size 8 --precision fp32
#
# bash compare_strategies.sh [MODEL] [arguments]        MODEL: tiny-gpt2 (default), or any other --model
# The arguments are passed to real_model_example.py, the same for every strategy. Without --max_steps, --epochs or
# --num_samples a run has 24 steps (tiny-gpt2) or 30 (any other model). Without --gradient_accumulation_steps a step has
# four micro-batches, because a fault in their sum would not show otherwise; without --batch_size of one sequence each.
# tiny-gpt2 is trained in fp32 without TF32 unless a precision is given: there rounding changes the losses least. Other
# models have the script's --precision. Each run prints its row of the table when it completes. Strategies whose
# DeepSpeed ops are not compiled yet come last: the ops are compiled between the runs.
# Environment variables:
#
#   STRATEGIES="dp zero2"   the strategies to compare (default: dp zero1 zero2 zero3 offload infinity fsdp)
#   NUM_GPUS=4              ranks (default: all visible GPUs; on a CPU 2 processes)
#   SIMULATE_GPUS=4         no training: the memory of rank 0 of 4 under each strategy, on one GPU or the CPU
#   REPEATS=3               runs of each strategy, in turn: medians and spread (default: 1)
#   TIMEOUT=1800            seconds for one run, and for the first compilation of DeepSpeed's ops (default: 1800)
#   CONTROL=0               leave out the control: dp with a 10% higher learning rate, which shows whether the
#                           comparison would detect a strategy that trains slightly differently (default: 1)
#   RESUME=1                keep the completed runs of the same comparison, run only what is missing, and the control
#   PYTHON=python3.12       interpreter (default: the active environment's, else .venv in this folder)
#
# Runs are kept under comparison_runs/<MODEL>/<strategy>/<repeat>/ (log.txt, results.json, metrics.jsonl); the report is
# comparison_results_<MODEL>.txt, .json, .md and .png. Exit code: 0, 1 if a loss curve differs or a strategy failed, 2 for
# wrong usage, 130 after Ctrl-C, with the report of the completed runs.
set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

die() {
    printf '❌ %s\n' "$*" >&2 || true
    exit 2
}
say() { # as printf; a full disk or a closed pipe must not end the comparison, whose results are in files
    # shellcheck disable=SC2059 # the format is the caller's
    printf "$@" 2> /dev/null || true
}

usage() {
    sed -n '2,/^set -/{/^#/!d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
}

# ------------------------------------------------------------------------------------------ arguments and settings

model=tiny-gpt2
case "${1-}" in
    -h | --help) usage ;;
    "" | --*) ;;
    *) model=$1 && shift ;;
esac

cap_steps=yes
for argument in "$@"; do
    flag=${argument%%=*}
    case "$flag" in
        -h | --help) usage ;;
        --model | --model_name | --model_name_or_path | --strategy | --use_deepspeed | --use_fsdp | --fsdp | --output_dir | \
            --overwrite | --overwrite_output_dir | --ds_config | --deepspeed | --deepspeed_config | --eval_only | --check | \
            --prefetch | --print_config | --show_sample)
            die "$flag is not for a comparison, which sets it or trains the same under every strategy (name MODEL first, and strategies with STRATEGIES=\"…\")." ;;
        --max_steps | --epochs | --num_epochs | --num_train_epochs | --num_samples | --max_train_samples | --data_size) cap_steps=no ;;
    esac
done

for name in RESUME CONTROL; do
    [[ ${!name-0} == [01] ]] || die "$name=${!name} must be 0 or 1."
done
[[ $model == *[^./]* ]] || die "MODEL is $model: use the name of a model or of a folder."
command -v timeout > /dev/null || die "timeout is missing: apt install coreutils (brew install coreutils on a Mac)."
for name in NUM_GPUS SIMULATE_GPUS REPEATS TIMEOUT; do
    [[ ! -v $name || ${!name} =~ ^[1-9][0-9]{0,5}$ ]] || die "$name=${!name} must be a whole number from 1 to 999999."
done
repeats=${REPEATS:-1} limit=${TIMEOUT:-1800}

if [[ -n ${PYTHON-} ]]; then
    python=$PYTHON
elif [[ -z ${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $project/.venv/bin/python ]]; then
    python=$project/.venv/bin/python
else
    python=$(command -v python || command -v python3) || die "No Python found: activate your environment, or set PYTHON."
fi
in_project() { # $1: Python code that may import from the project; the rest are its arguments
    "$python" -c "import sys; sys.path.insert(0, sys.argv.pop(1))"$'\n'"$1" "$project" "${@:2}"
}
every_strategy=$(in_project 'from distributed_training.strategies.table import STRATEGIES; print(*STRATEGIES)') ||
    die "Python cannot read the strategies: see above."
# shellcheck disable=SC2206 # split at blanks and line ends
strategies=(${STRATEGIES-$every_strategy})
((${#strategies[@]} > 0)) || die "STRATEGIES is empty: name some of $every_strategy, or leave it out."
named=" "
for strategy in "${strategies[@]}"; do
    [[ " $every_strategy " == *" $strategy "* ]] || die "STRATEGIES: $strategy is not one of $every_strategy."
    [[ $named != *" $strategy "* ]] || die "STRATEGIES names $strategy twice: REPEATS=2 repeats them all."
    named+="$strategy "
done
facts=$(in_project '
try:
    import torch
    from distributed_training.process import versions
    from distributed_training.run.results import hardware
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}")
from distributed_training.ranks.gpus import usable_gpus; gpus = usable_gpus()
print(gpus)
print("device", hardware(torch.device("cuda" if gpus else "cpu"))["gpu" if gpus else "cpu"])
print("cores", hardware(torch.device("cpu"))["cores"], "versions", versions())') ||
    die "A package is missing: make setup installs all packages into .venv (then set PYTHON=.venv/bin/python if another environment is active); or pip install -r requirements.txt."
gpus=${facts%%$'\n'*}
ranks=${NUM_GPUS:-$((gpus > 0 ? gpus : 2))}
[[ -z ${SIMULATE_GPUS-} ]] || ranks=1
((gpus == 0 || ranks <= gpus)) || die "NUM_GPUS=$ranks, but only $gpus GPU(s) are visible: use fewer, or check CUDA_VISIBLE_DEVICES."

# Dropout off: it would draw other numbers for each strategy, and the losses could not be compared.
arguments=(--dropout 0 --no_eval --no_save --no_export)
if [[ -n ${SIMULATE_GPUS-} ]]; then
    arguments+=(--simulate_gpus "$SIMULATE_GPUS")
elif [[ $cap_steps == yes ]]; then
    arguments+=(--max_steps "$([[ $model == tiny-gpt2 ]] && echo 24 || echo 30)")
fi
arguments+=("$@")
# Invalid arguments would fail in every run, so the script checks them once; with infinity if it is compared, because that
# strategy uses every flag.
checked=${strategies[0]}
[[ $named != *" infinity "* ]] || checked=infinity
in_project 'from distributed_training import entry; from tools.hooks import HOOKS; entry.prepare_process(sys.argv[1:], HOOKS)' \
    --model "$model" --strategy "$checked" "${arguments[@]}" || exit 2
# Four micro-batches, because sums that are wrong only for those in the middle have occurred.
[[ -n ${SIMULATE_GPUS-} ]] || defaults=$(in_project '
from distributed_training.cli.parse import read_command_line
line = read_command_line(sys.argv[1:])
if "gradient_accumulation_steps" not in line.given:
    own = "" if "global_batch_size" in line.given else "--gradient_accumulation_steps 4"
    print("" if "batch_size" in line.given else "--batch_size 1", own)
if "precision" not in line.given and line.settings.model.model == "tiny-gpt2":
    print("--precision fp32")
' --model "$model" --strategy "$checked" "${arguments[@]}") || exit 2
# shellcheck disable=SC2206 # split at blanks and line ends
arguments+=(${defaults-})
environment=()
[[ ${defaults-} != *fp32* ]] || environment=(NVIDIA_TF32_OVERRIDE=0)

# ------------------------------------------------------------------------------------------ the folder of this comparison

runs=comparison_runs/${model//\//_}
configuration=$(
    printf 'model %q\nranks %s\narguments' "$model" "$ranks" && printf ' %q' "${arguments[@]}" && printf '\n'
    printf '%s\n' "${facts#*$'\n'}" "tf32 ${NVIDIA_TF32_OVERRIDE-}${environment[*]}"
    printf 'code %s %s\n' "$(cat "$project"/ds_config_*.json | cksum)" \
        "$(in_project 'from distributed_training.process import code_digest; print(code_digest())')"
)
mkdir -p comparison_runs || die "$PWD/comparison_runs cannot be created: change to a folder that you may write to."
if command -v flock > /dev/null; then
    exec 9> "comparison_runs/.${model//\//_}.lock"
    flock --nonblock 9 || die "Another comparison of $model runs in this folder: wait for it, or use another folder."
fi
if [[ ${RESUME-} == 1 && -f $runs/configuration.txt ]]; then
    difference=$(diff <(cat "$runs/configuration.txt") <(printf '%s\n' "$configuration") | grep '^[<>]' | tr '\n' ' ') ||
        true
    [[ -z $difference ]] || die "RESUME=1, but $runs holds another comparison (< there, > requested now): ${difference}Use the same settings, or leave RESUME out to start again."
elif [[ -e $runs ]]; then
    rm -rf "$runs.previous" && mv "$runs" "$runs.previous" # one generation is kept, in case this was a slip
fi
mkdir -p "$runs"
printf '%s\n' "$configuration" > "$runs/configuration.txt"
device=$([[ $gpus == 0 ]] && echo cpu || echo cuda)
printf '%s\n' "${strategies[@]}" "$device" ${SIMULATE_GPUS:+simulated} > "$runs/planned.txt"

# ------------------------------------------------------------------------------------------ running

running="" scratch="" interrupted=0
trap '' PIPE # compare_strategies.sh | head

# Terminate the current run, and kill it at a second signal; run_once waits until it has exited.
# shellcheck disable=SC2329 # the traps below call it
stop() { # $1: exit code
    local signal=TERM
    [[ $interrupted == 0 ]] || signal=KILL
    interrupted=$1
    [[ $1 != 129 ]] || exec > /dev/null 2>&1 # the terminal was closed, and writing to it would end this script
    [[ -z $running ]] || kill -"$signal" "$running" 2> /dev/null || true
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'rm -rf "$scratch"' EXIT

survivors() { # processes of the run marked $1; torchrun's workers have sessions of their own, but they inherit the mark
    grep -lszx "COMPARISON_RUN=$1" /proc/[0-9]*/environ 2> /dev/null | cut -d / -f 3 || true
}

undisturbed() ( # a short command; a signal is this script's to handle, and that is done when the command has ended
    trap '' HUP INT TERM
    "$@"
)

await_running() { # $1: process; returns its exit code
    local code=0
    running=$1
    [[ $interrupted == 0 ]] || kill -TERM "$running" 2> /dev/null || true # the signal arrived while it was being started
    while kill -0 "$running" 2> /dev/null; do                             # a signal to this script ends `wait` early
        code=0 && wait "$running" || code=$?
    done
    running=""
    return "$code"
}

run_once() { # $1: strategy or "control", $2: repeat; the rest: more arguments for the script
    local folder=$runs/$1/$2 mark=$$-$1-$2 begun=$SECONDS code=0 port pids
    shift 2
    scratch=$(undisturbed mktemp -d) || return 0 # NVMe files, and whatever a run that is killed leaves behind
    port=$(undisturbed in_project 'from distributed_training.ranks.launch import free_port; print(free_port())') || return 0
    [[ $interrupted == 0 ]] || return 0
    rm -rf "$folder" && mkdir -p "$folder"
    local launcher=(-m torch.distributed.run --nproc_per_node="$ranks" --master_addr=127.0.0.1 --master_port="$port")
    [[ -z ${SIMULATE_GPUS-} ]] || launcher=()
    local command=(
        "$python" "${launcher[@]}"
        "$project/real_model_example.py" --model "$model" --output_dir "$folder" "${arguments[@]}" "$@"
    )
    printf '%q ' "${environment[@]}" "${command[@]}" > "$folder/command.txt"
    # timeout gives the run a process group of its own, out of reach of the terminal's Ctrl-C, which is for this script.
    env "${environment[@]}" COMPARISON_RUN="$mark" TMPDIR="$scratch" \
        timeout --kill-after=10 "$limit" "${command[@]}" > "$folder/log.txt" 2>&1 9>&- &
    await_running $! || code=$?
    for _ in {1..50}; do
        pids=$(survivors "$mark")
        [[ -n $pids ]] || break
        # shellcheck disable=SC2086 # one word for each process
        kill -KILL $pids 2> /dev/null || true
        sleep 0.1
    done
    rm -rf "$scratch"
    local outcome="exit $code" seconds=$((SECONDS - begun))
    if [[ $interrupted != 0 ]]; then
        outcome=interrupted
    elif [[ $code == 124 || $code == 137 ]] && ((seconds >= limit)); then # 137: it had to be killed
        outcome="timeout $limit"
    fi
    printf '%s\n' "$outcome" "$seconds" > "$folder/outcome.txt"
}

report() { undisturbed "$python" "$project/scripts/compare_runs.py" "$@"; }

compile_ops() { # those of the strategies in `uncompiled`; what cannot be compiled is reported by the runs
    timeout --kill-after=10 "$limit" "$python" "$project/scripts/build_ops.py" "${uncompiled[@]}" 9>&- &
    await_running $! || true
    uncompiled=()
}

new=0 # whether a run was not kept
run_and_say() { # as run_once; a completed run is kept under RESUME=1
    local folder=$runs/$1/$2 row code=0
    [[ $interrupted == 0 ]] || return 0
    if [[ ${RESUME-0} == 1 && -d $folder ]]; then
        row=$(report --status "$folder") || code=$?
        if [[ $code == 0 && ($1 != control || $new == 0) ]]; then # the control shows a change of load since then
            say '%s (kept)\n' "$row"
            return 0
        fi
        [[ $code == 0 || $code == 3 ]] || return 0 # 3: it is not completed
    fi
    new=1
    [[ " ${uncompiled[*]} " != *" $1 "* ]] || compile_ops
    [[ $interrupted == 0 ]] || return 0
    say '%s' "$1" # the first cell of the row
    run_once "$@"
    row=$(report --status "$folder") || true
    say '%s\n' "${row#"$1"}"
}

# The control needs a reference, and something to compare with it.
control=${CONTROL-1}
[[ -z ${SIMULATE_GPUS-} ]] || control=0
[[ $named == *" dp "* && ${#strategies[@]} -gt 1 ]] || control=0
total=$((repeats * ${#strategies[@]} + control))
# Results first: what needs no compilation runs before it. No compiler runs next to a run, whose speed it would change.
needing=$(undisturbed in_project '
from distributed_training.strategies.table import STRATEGIES
print(*(name for name in sys.argv[1:] if STRATEGIES[name].missing_ops()))' "${strategies[@]}") || needing="" # then the runs report it
read -ra uncompiled <<< "$needing"
order=()
for strategy in "${strategies[@]}"; do
    [[ " ${uncompiled[*]} " == *" $strategy "* ]] || order+=("$strategy")
done
order+=("${uncompiled[@]}")
doing="Comparing ${strategies[*]}"
[[ -z ${SIMULATE_GPUS-} ]] || doing="Simulating the memory of ${SIMULATE_GPUS} ranks under ${strategies[*]}"
say '%s\n' "$doing on $ranks $([[ $gpus == 0 ]] && echo 'CPU process(es)' || echo 'GPU(s)'): $total run(s), with their output in $runs/STRATEGY/1/log.txt."
say '\n%s\n' "$(report --status "$runs" || true)"
for ((repeat = 1; repeat <= repeats; repeat++)); do # in turn, so that a machine that slows down does so for all
    for strategy in "${order[@]}"; do
        run_and_say "$strategy" "$repeat" --strategy "$strategy"
    done
done
if [[ $control == 1 && $interrupted == 0 ]] && report --status "$runs/dp/1" > /dev/null; then
    higher=$(undisturbed in_project '
from pathlib import Path
from distributed_training.records.metrics_reader import read_metrics
records, _ = read_metrics(Path(sys.argv[1]))
print(1.1 * max(record["lr"] for record in records if "loss" in record))
' "$runs/dp/1/metrics.jsonl") || true
    [[ -z $higher ]] || run_and_say control 1 --strategy dp --lr "$higher"
fi

trap '' HUP INT TERM
say '\n'
code=0
report "$runs" || code=$?
[[ $interrupted == 0 ]] || exit "$interrupted"
exit "$code"
