"""What the memory and the cost of a run depend on, for any strategy; without PyTorch.

architectures  dimensions of a model that determine memory, read from its config.json
workload       model, batches, ranks and adapters of a run
activations    bytes that autograd and the loss keep
peak_flops     peak arithmetic rates of GPUs, the reference of MFU
rate           the rate of a GPU, measured or assumed; cost: hours and price at this rate
"""
