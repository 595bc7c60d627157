"""What a run reports, and what a comparison of runs reports.

start            the start of a run: the functions that the script calls, in their order
finish           the end of a run: best weights, results, export, sample, push
prompts          the prompts of --generate, continued at the end and at evaluations
run              the objects of a run whose training starts
run_folder       the output folder: its lock, and results.json from the start to the end
results          the content of results.json
run_plan         the memory estimate of a run in progress
run_workload     the workload of a run in progress, which it describes
start_log        what a run reports before its training: model, data, memory by phase
step_log         the log of the steps: metrics.jsonl, console, progress bar, trackers
results_types    checks the types in a results.json that is read
metrics_file     reads and writes metrics.jsonl, and draws loss.png
step_meter       measures a step: time by phase, memory, traffic
memory_profile   the lines of --profile_memory
profiling        --profile and --memory_snapshot: recordings for other tools
trackers         --report_to: the numbers of metrics.jsonl in TensorBoard and Weights & Biases
recorded_run     what a run recorded, read from its folder: how it ended, its numbers
compare          compares runs with the first, and strategies with each other
agreement        how the losses and gradient norms of two runs agree, and the tolerances
causes           what else differs between two runs, and what it can change
comparison_text  the comparison as tables and sentences, in text, Markdown and JSON
outliers         the steps whose loss or gradient norm stands out
replayed         replay-STEP.json, and the text of a step that --replay has repeated
plots            the figure of a comparison, and the charts of a page
page             one HTML page about a run or a comparison (page.html)
peak_flops       peak arithmetic rates of GPUs, the reference of MFU
cost             what a run will cost: hours, price, energy, Slurm jobs, and speed on more ranks
network_cost     what a slow network adds to a step, and the accumulation with which that is little
rate             the rate of a planned run, measured or assumed
"""
