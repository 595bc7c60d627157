"""What a run reports, and what a comparison of runs reports.

divergence     why two runs differ: their losses step by step, and what else differs
effects        the effect on the losses of what may differ between two runs
page           one HTML page about a run or a comparison
compare        reads the runs of a comparison, checks that they did the same work, and compares them
verdict        the conclusions of a comparison in sentences
tables         the report on a comparison as text, Markdown and JSON
plots          the figures of a comparison and of two runs, and the charts of a page
scaling        forecast of the step time on more ranks
run_record     the files of a run, from the output folder to the exported model
metrics_log    measures a run step by step: time, losses, tokens and memory, into metrics.jsonl
step_timer     time of each phase of a step
results        results.json: what a run was, how it ended, and what it measured
summary        the measured part of results.json, combined over the ranks
output_dir     the output folder of a run and its lock
console_lines  the lines that a run prints about its set-up and its results
profiling      --profile and --memory_snapshot: recordings for other tools
trackers       --report_to: the numbers of metrics.jsonl in TensorBoard and Weights & Biases
peak_flops     peak arithmetic rates of GPUs, the reference of MFU
cost           what a run will cost: steps, hours, price and energy, from a measured or assumed rate
measure_rate   a short run of planned work, for its rate
slurm_budget   the Slurm jobs that a run needs, and how often it should save
"""
