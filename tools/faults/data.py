"""Faults of the data and its order."""

from tools.faults.checks import ONE_AND_DP, WITH_PACKING, EpochsAtRateZero, SampleTrainsTheAnswer
from tools.faults.fault import Fault, Report

GROUP = "data and order"

FAULTS = (
    Fault(
        "same_data_on_every_rank",
        GROUP,
        "Every rank trains on the sequences of rank 0.",
        (
            Report(
                "openspeech-team/openspeech",
                149,
                "Samplers give every rank the same examples under DDP",
            ),
        ),
        "It falls slower: N ranks train as one, on 1 / N of the data in an epoch.",
        ONE_AND_DP,
        "Print the ids of the first batch on every rank. Or train one step on one rank and on two, "
        "with the same global batch: the losses must agree.",
    ),
    Fault(
        "same_order_every_epoch",
        GROUP,
        "Every epoch has the order of the first one.",
        (
            Report(
                "pytorch/pytorch",
                31771,
                "Without set_epoch, DistributedSampler gives the same order in every epoch",
            ),
            Report(
                "huggingface/transformers",
                4398,
                "Trainer did not call sampler.set_epoch in distributed training",
            ),
        ),
        "The same ups and downs in each epoch, and the same sequences share a batch again.",
        EpochsAtRateZero(),
        "Train two epochs with a learning rate of almost 0. The losses of the second epoch must "
        "not repeat those of the first, step by step; their means must be equal.",
    ),
    Fault(
        "end_token_not_trained",
        GROUP,
        "The end token has no loss, because it is also the padding token.",
        (
            Report(
                "huggingface/trl",
                1623,
                "Models trained by SFTTrainer sometimes do not learn to generate the end token",
            ),
            Report(
                "mlabonne/llm-course",
                33,
                "With pad_token = eos_token, the model does not learn when to stop",
            ),
        ),
        "Nothing that can be seen, but the trained model does not stop.",
        SampleTrainsTheAnswer(),
        "Print a batch's labels next to its tokens: the last label of each answer must be the end "
        "token.",
    ),
    Fault(
        "prompt_mask_too_long",
        GROUP,
        "The mask of the prompt covers the first token of the answer.",
        (Report("tloen/alpaca-lora", 306, "The mask of the prompt was one token too long"),),
        "Nothing that can be seen: the first token of an answer is one of many.",
        SampleTrainsTheAnswer(),
        "Decode the tokens whose labels are not ignored: it must be the answer, all of it.",
    ),
    Fault(
        "documents_attend_to_each_other",
        GROUP,
        "Packed examples attend to the examples before them in their sequence.",
        (
            Report(
                "huggingface/nanoVLM",
                204,
                "Packed samples attend to earlier samples; positions are not reset",
            ),
            Report(
                "huggingface/trl",
                784,
                "Packing does not adjust the attention mask, so samples attend to earlier ones",
            ),
        ),
        "Almost the usual curve, unless an example repeats one before it.",
        WITH_PACKING,
        "Compute the loss of two examples, each alone and then packed into one sequence: the sums "
        "must be equal.",
    ),
    Fault(
        "evaluation_repeats_sequences",
        GROUP,
        "The last batch of an evaluation is filled up with the first sequences.",
        (
            Report(
                "pytorch/pytorch",
                25162,
                "DistributedSampler duplicates samples, which makes the validation accuracy wrong",
            ),
            Report(
                "roboflow/rf-detr",
                1507,
                "Validation metrics on several GPUs count the sampler's repeated images",
            ),
        ),
        "The training loss is right, and the evaluation depends on the number of ranks.",
        ONE_AND_DP,
        "Evaluate the same weights with batches of 1 and of 8, on one rank and on two: the losses "
        "must agree to six digits.",
    ),
)
