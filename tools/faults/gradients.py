"""Faults of the loss and the gradients."""

from tools.faults.checks import (
    FP32_AND_BF16,
    LONG,
    ONE_AND_DP,
    ONE_AND_FSDP,
    ONE_AND_MUON,
    WITH_CHECKPOINTING,
    Prove,
)
from tools.faults.fault import Fault, Report

GROUP = "loss and gradients"

FAULTS = (
    Fault(
        "mean_of_means",
        GROUP,
        "The loss is the mean of the means of micro-batches and ranks, not of all tokens.",
        (
            Report(
                "huggingface/transformers",
                34242,
                "The loss averages per accumulation and per rank, so DDP is not equivalent",
            ),
            Report(
                "huggingface/transformers",
                37766,
                "Loss divided by one forward pass's items, so accumulation raises it",
            ),
        ),
        "Tokens of short sequences weigh more. The curve has its usual shape at another height.",
        ONE_AND_DP,
        "Train on sequences of different lengths, once in one batch and once in micro-batches of "
        "one sequence, without dropout. The losses of step 1 must agree to six digits.",
        curve=LONG,
        also=(Prove(),),  # one process that accumulates differs, too
    ),
    Fault(
        "last_micro_batch_only",
        GROUP,
        "The gradients are reset before each micro-batch, so only the last one counts.",
        (
            Report(
                "pytorch/torchtitan",
                3575,
                "zero_grad in the wrong place dropped every micro-batch but the last",
            ),
            Report(
                "allenai/open-instruct",
                1498,
                "Under ZeRO-2, only the last micro-batch's gradient survived to step()",
            ),
        ),
        "The loss of step 1 is right. Then it falls slower, with more noise.",
        ONE_AND_DP,
        "Compare the gradient norm of step 1, before clipping, with and without accumulation, on "
        "the same global batch. The loss of step 1 does not show it.",
        curve=LONG,
    ),
    Fault(
        "wrong_micro_batch_synchronized",
        GROUP,
        "The ranks reduce the gradients of the first micro-batch, not the sum of all.",
        (
            Report(
                "modelscope/FunASR",
                3472,
                "The first micro-batch is synchronized, the last is not: gradients stay local",
            ),
            Report(
                "facebookresearch/ClassyVision",
                706,
                "no_sync must cover the forward pass of DDP, too, not only the backward",
            ),
        ),
        "The loss of step 1 is right. Then it falls slower: each rank trains its own model.",
        ONE_AND_DP,
        "Compute a checksum of the weights on each rank after a few steps: they must be equal.",
    ),
    Fault(
        "world_size_factor_missing",
        GROUP,
        "The loss is divided by the tokens of all ranks, and DDP averages over the ranks again.",
        (
            Report(
                "meta-pytorch/torchtune",
                2172,
                "FSDP and DDP divide gradients by world size; normalizing by tokens must undo it",
            ),
            Report(
                "verl-project/verl-SpeCo",
                29,
                "Gradients divided by world size twice, so the effective rate was lr / W",
            ),
        ),
        "Adam hides it, because its update does not depend on the gradient's scale; clipping "
        "and SGD do not.",
        ONE_AND_DP,
        "Compare the gradient norm of step 1 on one rank and on N ranks, with the same global "
        "batch. A ratio of N or 1 / N is this fault.",
    ),
    Fault(
        "clip_local_norm",
        GROUP,
        "With sharded gradients each rank clips by the norm of its own shard.",
        (
            Report(
                "areal-project/AReaL",
                312,
                "With FSDP the gradient norm is computed over local shards, not globally",
            ),
            Report(
                "PrimeIntellect-ai/OpenDiloco",
                6,
                "Replaces torch's clip_grad_norm_ by FSDP's, which sees all shards",
            ),
        ),
        "Hardly anything: Adam's update does not depend on the gradient's scale. But each shard is "
        "clipped differently, and all of them too late.",
        ONE_AND_FSDP,
        "Compare the gradient norm of step 1 with and without sharding. That of a shard of N is "
        "about 1 / sqrt(N) of the norm.",
    ),
    Fault(
        "scheduler_per_rank",
        GROUP,
        "The learning rate's schedule advances once for each rank in a step.",
        (
            Report(
                "huggingface/transformers",
                24088,
                "The scheduler was stepped num_processes times too fast",
            ),
            Report(
                "huggingface/diffusers",
                3954,
                "Example schedules step N times for each optimizer step on N GPUs",
            ),
        ),
        "The curve becomes flat after 1 / N of the steps, because the rate has reached its end.",
        ONE_AND_DP,
        "Plot the logged learning rate: it must reach its end in the last step, for any number of "
        "ranks.",
        curve=LONG,
    ),
    Fault(
        "dropout_redrawn",
        GROUP,
        "Gradient checkpointing draws other dropout masks when it recomputes the activations.",
        (
            Report(
                "allenai/OLMo-core",
                828,
                "Checkpointing did not preserve RNG state; recomputation drew fresh dropout masks",
            ),
            Report(
                "openai/guided-diffusion",
                167,
                "Checkpointed blocks see another dropout mask in backward; the loss diverges",
            ),
        ),
        "The loss of step 1 is right, but the gradients belong to other masks. In the report of "
        "OLMo-core it was 2.49 instead of 2.20 at step 150.",
        WITH_CHECKPOINTING,
        "Train a few steps with dropout and a seed, with and without gradient checkpointing: all "
        "losses must be equal.",
    ),
    Fault(
        "decay_on_norms",
        GROUP,
        "Weight decay also shrinks biases and the weights of norms.",
        (
            Report(
                "ServiceNow/Fast-LLM",
                542,
                "A refactoring applied weight decay to norm weights and biases again",
            ),
            Report(
                "huggingface/transformers",
                35927,
                "RMSNorm variants were not excluded from weight decay; only nn.LayerNorm was",
            ),
        ),
        "Hardly anything in a short run: only the updates show it.",
        Prove(),
        "List the parameters of each group of the optimizer with their shapes. Or compare one "
        "update with another trainer's, weight by weight.",
    ),
    Fault(
        "padding_in_loss",
        GROUP,
        "The tokens that pad a batch to one length are trained, too.",
        (
            Report(
                "EleutherAI/gpt-neo", 45, "Padding tokens in the labels were counted in the loss"
            ),
            Report("01-ai/Yi", 110, "Labels of padding tokens are not ignored in the loss"),
        ),
        "The loss falls fast and ends too low: to predict padding after padding is easy.",
        ONE_AND_DP,
        "Compute the loss of a short sequence alone, and next to a long one that pads it: the sum "
        "over its tokens must not change.",
        curve=LONG,
    ),
    Fault(
        "double_shift",
        GROUP,
        "The labels are shifted twice, so the model learns to predict the token after the next.",
        (
            Report(
                "huggingface/transformers",
                47394,
                "GitForCausalLM shifts labels twice and predicts token t + 2",
            ),
            Report(
                "huggingface/transformers",
                46898,
                "Florence2's labels were shifted twice in training",
            ),
        ),
        "It starts at the same height and falls slower: the token after the next is harder to "
        "predict.",
        Prove(),
        "Compute the loss of a pretrained model on plain text, before any training. If it is near "
        "the logarithm of the vocabulary's size, the labels do not fit the inputs.",
    ),
    Fault(
        "bf16_without_master",
        GROUP,
        "The weights are in bf16 without a copy in fp32, so small updates are rounded away.",
        (
            Report(
                "areal-project/AReaL",
                1369,
                "AdamW inherited bf16 from the parameters; the late loss was 3 times higher",
            ),
            Report(
                "NVIDIA/apex", 1728, "FusedAdam ignores master_weights=True for bfloat16 parameters"
            ),
        ),
        "It falls slower, the more so the smaller the learning rate is: a weight does not move if "
        "its update is less than 1/512 of it.",
        FP32_AND_BF16,
        "Print the dtypes of the optimizer's parameters and of its state: the weights that it "
        "updates must be in fp32. Or train the same steps in fp32, too.",
    ),
    Fault(
        "muon_of_placeholders",
        GROUP,
        "Under ZeRO-3 Muon looks for matrices among empty placeholders, so AdamW updates all.",
        (
            Report(
                "deepspeedai/DeepSpeed",
                8438,
                "Under zero.Init every parameter has one dimension, so none is Muon's",
            ),
            Report(
                "hiyouga/LlamaFactory", 8041, "Under ZeRO-3 the log says that Muon has 0 parameters"
            ),
        ),
        "The usual curve of AdamW, which looks right.",
        ONE_AND_MUON,
        "Print how many parameters each optimizer updates, after the model was sharded. A run here "
        "prints it, and stops if Muon would update none: the patch removes this check, too.",
    ),
)
