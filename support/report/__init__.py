"""What a run reports, and what a comparison of runs reports.

run              a run from its output folder to the exported model: results.json, metrics.jsonl
results          the output folder, the content of results.json, and the lines that show it
results_types    checks the types in a results.json that is read
metrics_file     reads and writes metrics.jsonl, and draws loss.png
step_meter       measures a step: time by phase, memory, traffic
memory_profile   the lines of --profile_memory
profiling        --profile and --memory_snapshot: recordings for other tools
trackers         --report_to: the numbers of metrics.jsonl in TensorBoard and Weights & Biases
compare          reads runs, and compares each with the first: numbers and losses
causes           what else differs between two runs, and what it can change
comparison_text  the comparison as tables and sentences, in text, Markdown and JSON
plots            the figure of a comparison, and the charts of a page
page             one HTML page about a run or a comparison (page.html)
peak_flops       peak arithmetic rates of GPUs, the reference of MFU
cost             what a run will cost: hours, price, energy, Slurm jobs, and speed on more ranks
"""
