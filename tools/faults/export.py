"""Faults of sharding and of the exported model."""

from tools.faults.bench import Launch
from tools.faults.checks import EXACT, ONE_AND_FSDP, SPLIT
from tools.faults.fault import Fault, Report
from tools.faults.state_checks import Reload

GROUP = "sharding and export"
EVALUATED = "--dataset {pairs} --seq_length 64 --num_samples 37 --eval_samples 9 --precision fp32"
# With a scale of 8 and a high learning rate, adapters matter after few steps.
MERGED = Reload(
    Launch(
        f"{EXACT} --batch_size 8 --max_steps 5 --lora_r 4 --lora_alpha 32 --merge_lora".replace(
            " --no_export", ""
        ).replace("--lr 1e-3", "--lr 0.1")
    ),
    EVALUATED,
)
SHARDED = Reload(
    Launch(f"{SPLIT} --max_steps 3 --strategy fsdp".replace(" --no_export", ""), 2), EVALUATED
)

FAULTS = (
    Fault(
        "unscaled_merge",
        GROUP,
        "LoRA adapters are merged into the weights without their scale, alpha / r.",
        (
            Report(
                "hao-ai-lab/FastVideo",
                870,
                "Merging LoRA weights did not scale them by alpha / rank",
            ),
            Report(
                "huggingface/peft",
                2489,
                "Merging ignored the scale of LoRA's bias; the tests had a scale of 1",
            ),
            Report(
                "verl-project/verl", 5325, "The merger writes lora_alpha 0, so the scale is lost"
            ),
        ),
        "Nothing to see: the training is right, but the exported model is another one.",
        MERGED,
        "Evaluate the merged model on the data of the last evaluation: the losses must agree to "
        "six digits. Use a scale other than 1.",
    ),
    Fault(
        "only_shard_of_rank_0",
        GROUP,
        "The exported model has rank 0's shards, and zeros instead of those of the other ranks.",
        (
            Report(
                "deepspeedai/DeepSpeed",
                3607,
                "save_16bit_model saves only the part of the weights that rank 0 has",
            ),
            Report(
                "huggingface/accelerate",
                2294,
                "Under ZeRO-3, save_pretrained writes a file of 2 MB",
            ),
            Report("deepspeedai/DeepSpeed", 2413, "Files of a ZeRO-3 model have empty tensors"),
        ),
        "Nothing to see: the training is right, but the exported model is broken.",
        SHARDED,
        "Train on at least two ranks, load the exported model in one process, and evaluate it: its "
        "loss must agree with that of the last evaluation.",
    ),
    Fault(
        "untied_head",
        GROUP,
        "Sharding separates the output layer from the embedding whose weight it shares.",
        (
            Report(
                "NVIDIA-NeMo/Automodel",
                2511,
                "A head declared as tied was trained separately, then replaced on a resume",
            ),
            Report(
                "NVIDIA-NeMo/Automodel",
                2213,
                "FSDP2's fully_shard replaces a tied weight by separate DTensors",
            ),
        ),
        "Close to the right curve at first: another model, with more parameters, is trained.",
        ONE_AND_FSDP,
        "Train some steps with sharding and without: the losses must agree to four digits. And "
        "compare data_ptr() of the two weights after the model was sharded.",
    ),
)
