"""Faults of the loss and the gradients."""

from faults.checks import DP, WHOLE, Compare
from faults.fault import Fault, Report

GROUP = "loss and gradients"

MEAN_OF_MEANS = Fault(
    "mean_of_means",
    GROUP,
    "the loss is the mean of the means of micro-batches and ranks",
    (
        Report(
            "huggingface/transformers",
            34242,
            "The loss averages per accumulation and per rank separately; DDP is not equivalent",
        ),
        Report(
            "huggingface/transformers",
            37766,
            "The loss is divided by one forward pass's items, so accumulation raises it",
        ),
    ),
    "tokens of short sequences weigh more; the curve has the usual shape at another height",
    Compare(WHOLE, DP),
    "Train a few steps on sequences of different lengths, once as one batch and once as "
    "micro-batches of one sequence. Without dropout the losses of step 1 are equal to six digits.",
    curve=DP,
)

FAULTS = (MEAN_OF_MEANS,)
