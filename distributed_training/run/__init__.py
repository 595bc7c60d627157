"""A run from its output folder to its results: what it logs, measures and writes.

run_folder      the output folder: its lock, and results.json from the start to the end
start_log       what a run reports before its training: model, data, memory by phase
balancing       how a run lets something change the shares of its ranks; rounded_shares: a notice
run             the objects of a run whose training starts
prepare_deepspeed  the steps before DeepSpeed's engine is created
signatures      the run signatures of a run that was resumed
run_end         the end of a run: best weights, results, exported model, generated texts
memory_plan     the memory plan of a run in progress, which a tool makes
run_workload    the workload of a run in progress, and the memory that it may use
step_log        the log of the steps: metrics.jsonl, console, progress bar, trackers
step_meter      measures a step: time by phase, memory, traffic
trackers        --report_to: the numbers of metrics.jsonl in TensorBoard and Weights & Biases
prompts         the prompts of --generate, continued at the end and at evaluations
results         the content of results.json
memory_profile  the lines of --profile_memory
profiling       --profile and --memory_snapshot: recordings for other tools
"""
