"""What differs between the strategies: DeepSpeed's set-up, gradients, and optimizer states.

deepspeed         DeepSpeed's configuration for the model and machine, and its messages
requirements      checks for a compiler, locked memory and the NVMe folder
ops               DeepSpeed's C++ ops: which a strategy needs, where they are, how they are compiled
contexts          precision of a micro-batch, gradient reduction, how FSDP shards
optimizer         the optimizer of --optim, its parameter groups and its learning rate
gradients         gradient norm, check for non-finite values, loss scaling
optimizer_shards  locations of the fp32 weights and Adam moments on each rank
"""
