"""Memory of a run: estimated before it starts, and measured while it runs.

architectures  dimensions of a model that determine memory, read from its config.json
workload       model, batches, ranks and adapters of a run
activations    bytes that autograd and the loss keep
estimate       bytes on each GPU, in host memory and on NVMe for each strategy
fit            what fits: the simplest strategy, the largest batch; advice to a run out of memory
measure        bytes by phase of a run, and during one step
allocation_profile  live and peak bytes of a step on a CPU
live           live tensors by category
system         memory and disks as the operating system and the driver count them
"""
