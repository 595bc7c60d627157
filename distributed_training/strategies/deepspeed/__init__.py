"""DeepSpeed: the stages of ZeRO, CPU offload and NVMe offload (Infinity)."""
