"""Faults of the data and its order."""

from faults.checks import DP, WHOLE, Compare, EpochsAtRateZero
from faults.fault import Fault, Report

GROUP = "data and order"

SAME_DATA_ON_EVERY_RANK = Fault(
    "same_data_on_every_rank",
    GROUP,
    "every rank trains on the sequences of rank 0",
    (
        Report(
            "openspeech-team/openspeech",
            149,
            "Samplers give every rank the same examples under DDP",
        ),
    ),
    "N ranks train as one: the curve is noisier, and an epoch shows the model a share of the data",
    Compare(WHOLE, DP),
    "Print the ids of the first batch on every rank. Or train one step with one rank and with two, "
    "on the same global batch: the losses are equal.",
    curve=DP,
)

SAME_ORDER_EVERY_EPOCH = Fault(
    "same_order_every_epoch",
    GROUP,
    "every epoch has the order of the first one",
    (
        Report(
            "pytorch/pytorch",
            31771,
            "Without set_epoch, DistributedSampler gives the same order in every epoch",
        ),
    ),
    "the same ups and downs in each epoch; overfits the order",
    EpochsAtRateZero(),
    "Train two epochs with a learning rate of almost 0. The losses of the second epoch must not "
    "repeat those of the first step by step, while their means are equal.",
)

FAULTS = (SAME_DATA_ON_EVERY_RANK, SAME_ORDER_EVERY_EPOCH)
