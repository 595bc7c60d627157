"""Sizes of DeepSpeed's buckets, which its configuration and the memory estimate share."""


def bucket_sizes(hidden_size: int, parameters: int, tied_on_nvme: bool) -> dict[str, int]:
    """Choose the sizes of DeepSpeed's buckets for a model.

    DeepSpeed's default of 5e8 elements is more than the whole of GPT-2 medium. Ours hold one
    transformer block, about 12 · hidden² parameters, so that communication overlaps with the
    computation of the next block.

    Args:
        tied_on_nvme: parameters are offloaded to NVMe, and two layers share one.
    """
    block = min(max(12 * hidden_size**2, 1_000_000), max(parameters, 1))
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        # DeepSpeed 0.19 prefetches a tied weight from NVMe a second time while it is being read,
        # and stops with "already assigned swap buffer"; without prefetching it does not.
        "stage3_prefetch_bucket_size": 0 if tied_on_nvme else block,
        # Where single layers are gathered, norms and biases are not sharded: they are small, and an
        # all-gather of each costs time.
        "stage3_param_persistence_threshold": 10 * hidden_size,
        # An all-gathered parameter is freed at once if the next transformer block does not need it.
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": block,
        "sub_group_size": max(4 * block, 10_000_000),
    }
