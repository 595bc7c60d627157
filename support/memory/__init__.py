"""Memory of a run: estimated before it starts, and measured while it runs.

architectures  dimensions of a model that determine memory, read from its config.json
estimate       bytes on each GPU, in host memory and on NVMe for each strategy; what fits
advise         the estimate of this run, and advice if it runs out of memory
measure        live bytes by category and peak bytes by phase of a run
"""
