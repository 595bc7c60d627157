"""What differs between the strategies: DeepSpeed's set-up, gradients, and optimizer states.

deepspeed         DeepSpeed's configuration for the model and machine, and its messages
requirements      checks for a compiler, libaio, locked memory and the NVMe folder
ops               DeepSpeed's C++ ops: which a strategy needs, where they are, how they are compiled
fsdp              which layers FSDP shards, and how the weights reach the shards
gradients         gradient norm, check for non-finite values, loss scaling
optimizer_shards  locations of the fp32 weights and Adam moments on each rank, for dp and fsdp
zero_shards       the same for DeepSpeed's stages
adafactor_states  Adafactor's states
moments_8bit      Adam's moments in the 8 bits of bitsandbytes
"""
