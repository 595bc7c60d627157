"""What differs between the strategies: DeepSpeed's set-up, gradients, and optimizer states.

deepspeed         DeepSpeed's configuration for the model and machine, and its messages
requirements      checks for compilers, libaio, the CUDA toolkit and the NVMe folder
fsdp              FSDP's mesh, precision and CPU offload
op_builds         compilation of DeepSpeed's C++ ops, guarded by a lock
contexts          context managers of a micro-batch: precision, gradient reduction
optimizer         AdamW, its parameter groups and its learning rate
gradients         gradient norm, check for non-finite values, loss scaling
optimizer_shards  locations of the fp32 weights and Adam moments on each rank
"""
