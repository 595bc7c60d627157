"""Faults of the numbers about memory and work."""

from tools.faults.bench import Launch
from tools.faults.fault import Fault, Report
from tools.faults.state_checks import CountedParameters, CountedTokens, PlannedStates

GROUP = "memory and counts"
SEQ_LENGTH = 64
# One epoch of all rows, on two ranks.
EPOCH = Launch(
    f"--model {{model}} --from_scratch --dataset {{pairs}} --seq_length {SEQ_LENGTH} "
    "--validation_split 0 --no_eval --precision fp32 --dropout 0 --batch_size 8 --strategy zero3",
    2,
)
TOKENS = CountedTokens(EPOCH, SEQ_LENGTH)

FAULTS = (
    Fault(
        "padding_counted",
        GROUP,
        "The number of tokens, and so tokens per second, includes the padding.",
        (
            Report("awslabs/sockeye", 1073, "The reported tokens per second include padding"),
            Report(
                "AmpereComputingAI/ampere_model_library",
                271,
                "The throughput counts the padding of a batch as work",
            ),
        ),
        "Nothing to see. A run with more padding looks faster.",
        TOKENS,
        "Count the tokens of the rows with the tokenizer alone: one epoch must have this number.",
    ),
    Fault(
        "tokens_times_ranks",
        GROUP,
        "The tokens of all ranks are multiplied by the number of ranks once more.",
        (
            Report(
                "huggingface/trl",
                7100,
                "num_tokens is summed over ranks that have the same batch: tp_size times too high",
            ),
            Report(
                "meta-pytorch/torchtune",
                2622,
                "Tokens per second are too high with ranks that are not data parallel",
            ),
            Report(
                "huggingface/lerobot",
                2579,
                "The samples were multiplied by the number of processes twice",
            ),
        ),
        "Nothing to see over steps. Over tokens the curve is stretched, and looks worse.",
        TOKENS,
        "Train one epoch on one rank and on two: the number of tokens must be the same.",
    ),
    Fault(
        "parameters_of_placeholders",
        GROUP,
        "ZeRO-3's empty placeholders are counted, not the parameters that they stand for.",
        (
            Report(
                "huggingface/transformers",
                22179,
                "Trainer reports 0 trainable parameters under ZeRO-3",
            ),
            Report("deepspeedai/DeepSpeed", 4064, "numel() of every parameter is 0 under ZeRO-3"),
            Report(
                "huggingface/peft",
                139,
                "The number of all parameters excludes the sharded ones under ZeRO-3",
            ),
        ),
        "Nothing to see. Everything computed from the number is wrong, such as the utilization.",
        CountedParameters(EPOCH),
        "Add up numel() over the tensors of the exported file, and compare the sum with the number "
        "that the run reports. Under ZeRO-3 the size of a parameter is in ds_numel.",
    ),
    Fault(
        "parameters_stay_gathered",
        GROUP,
        "ZeRO-3 keeps every parameter whole on every rank.",
        (
            Report(
                "deepspeedai/DeepSpeed",
                5819,
                "With ZeRO-3 the parameters are copied to all GPUs, not partitioned",
            ),
        ),
        "Nothing to see. A rank needs more memory than under ZeRO-2.",
        PlannedStates(EPOCH),
        "Add up the bytes of the parameters on a rank between two steps: about 1 / N of the model.",
    ),
)
