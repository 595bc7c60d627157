"""Memory of a run: estimated before it starts, and measured while it runs.

find_architecture  from the value of --model to its architecture
estimate       bytes on each GPU, in host memory and on NVMe for each strategy
fit            what fits: the simplest strategy, the largest batch; advice to a run out of memory
measure        bytes by phase of a run, and during one step
step_marks     the phases of one step; allocation_profile: their bytes on a CPU
live           live tensors by category
system         memory and disks as the operating system and the driver count them
"""
