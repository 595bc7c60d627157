"""What a run reports, and what a comparison of runs reports.

compare        reads the runs of a comparison, checks that they did the same work, and compares them
verdict        the conclusions of a comparison in sentences
tables         the report on a comparison as text, Markdown and JSON
plots          the figure of a comparison
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
"""
