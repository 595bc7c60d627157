"""Programs around the trainer. They import distributed_training, which imports none of them.

plan        scripts/plan_memory.py: memory, cost and speed of a run before it starts
runs        scripts/compare_runs.py and scripts/report.py: compare runs, and show one on a page
check       --check, --prefetch, --show_sample: what a run needs, without training
choose      --strategy auto and --batch_size auto
balance     --rank_shares auto
replay      --replay: repeats the steps of a run, and shows one
prove       --prove: one step in several ways that must be equal
convert     scripts/convert_checkpoint.py: checkpoints of other programs, and for them
slurm       scripts/distributed_setup.py: configurations, launch scripts and Slurm jobs
chat        scripts/chat.py: talks to a trained model in the terminal
hand_over   scripts/hand_over.py: a model for llama.cpp and Ollama, and whether it answers the same
ops         scripts/build_ops.py: compiles DeepSpeed's ops
faults      make faults: documented bugs, and the checks that show them
lab         make lab: tasks for students, which check themselves
benchmarks  make bench: speed and memory next to other trainers
docs        generated sections and pictures of the documents
hooks       which of them take part in a run
plotting    colors and bars that the figures of several tools have in common

A tool is a folder that can be deleted: no other tool imports it. Each has a README.
"""
