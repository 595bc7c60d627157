"""What a run reports, and what a comparison of runs reports.

compare      reads the runs of a comparison, checks that they did the same work, and compares them
verdict      the conclusions of a comparison in sentences
tables       the report on a comparison as text, Markdown and JSON
plots        the figure of a comparison
metrics_log  follows a run step by step: time, losses, tokens and memory, into metrics.jsonl
results      results.json, the output folder with its lock, and the console lines of a run
profiling    --profile and --memory_snapshot: recordings for other tools
trackers     --report_to: the numbers of metrics.jsonl in TensorBoard and Weights & Biases
peak_flops   peak arithmetic rates of GPUs, the reference of MFU
"""
