"""What transformers' Trainer does differently: docs/COMING_FROM.md names each difference.

Each test runs Trainer of this release, so that a change there is noticed, and our function next to
it.
"""

import copy
from importlib.metadata import version

import numpy as np
import pytest
import torch
from packaging.version import Version
from small_models import CONFIGS
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from distributed_training.cli.parse import parse_arguments
from distributed_training.data.sequences import Padding, Sequences
from real_model_example import learning_rate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        Version(version("transformers")) < Version("5.23"), reason="documented of transformers 5.23"
    ),
]
ROWS = [
    {"input_ids": ids, "labels": ids}
    for ids in ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], [20, 21, 22], [30, 31, 32, 33, 34])
]
PREDICTED = [len(row["labels"]) - 1 for row in ROWS]


class Rates(TrainerCallback):
    """The learning rate of each update."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, *_, optimizer, **__):
        self.found.append(optimizer.param_groups[0]["lr"])


def padded(rows):
    most = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100}
    return {
        key: torch.tensor([row[key] + [value] * (most - len(row[key])) for row in rows])
        for key, value in fill.items()
    }


def new_model(family):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config)


def trainer(folder, model, rows=ROWS, kind=Trainer, **options):
    options = {
        **{"use_cpu": True, "report_to": [], "logging_steps": 1, "disable_tqdm": True},
        **{"save_strategy": "no", "per_device_train_batch_size": 1, "max_grad_norm": 0},
        **options,
    }
    arguments = TrainingArguments(str(folder), **options)
    return kind(
        model, arguments, train_dataset=rows, eval_dataset=ROWS, data_collator=padded,
        callbacks=[Rates()],
    )  # fmt: skip


def rates_of(done):
    return next(c for c in done.callback_handler.callbacks if isinstance(c, Rates)).found


def sums(model):
    """The sum of the losses of each row."""
    with torch.no_grad():
        return [
            functional.cross_entropy(
                model(torch.tensor([row["input_ids"]])).logits[0, :-1],
                torch.tensor(row["labels"][1:]),
                reduction="sum",
            ).item()
            for row in ROWS
        ]


def test_evaluations_are_every_n_steps_and_after_the_last(tmp_path):
    """As ours: see `TrainState.evaluation_is_due`."""
    done = trainer(tmp_path, new_model("gpt2"), max_steps=3, eval_strategy="steps", eval_steps=2)
    done.train()
    assert [e["step"] for e in done.state.log_history if "eval_loss" in e] == [2, 3]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_divisor_of_an_accumulated_loss_depends_on_the_class(tmp_path, family):
    """GPT-2: all labels; Llama: those that are predicted, as ours under every model."""
    model, rows = new_model(family), [ROWS[3], ROWS[2]]
    total = sum(sums(model)[2:])
    done = trainer(tmp_path, model, rows, max_steps=1, gradient_accumulation_steps=2)
    done.train()
    divisor = {"gpt2": 8, "llama": 6}[family]
    assert done.state.log_history[0]["loss"] == pytest.approx(total / divisor, rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_eval_loss_is_no_mean_over_tokens(tmp_path, family):
    """Batches of three rows and one; test_evaluation.py has ours, the mean over tokens."""
    model = new_model(family).eval()
    by_row = sums(model)
    means = [sum(by_row[:3]) / sum(PREDICTED[:3]), by_row[3] / PREDICTED[3]]
    by_rows = (3 * means[0] + means[1]) / 4
    found = trainer(tmp_path, model, per_device_eval_batch_size=3).evaluate()["eval_loss"]
    if family == "llama":
        assert found == pytest.approx(by_rows, rel=1e-5)
    else:  # each batch's mean times predicted / all labels
        shares = [sum(PREDICTED[:3]) / (sum(PREDICTED[:3]) + 3), PREDICTED[3] / (PREDICTED[3] + 1)]
        scaled = (3 * means[0] * shares[0] + means[1] * shares[1]) / 4
        assert found == pytest.approx(scaled, rel=1e-5) and found < 0.9 * by_rows


def test_the_first_step_of_a_warm_up(tmp_path):
    options = {"warmup_steps": 4, "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    options["lr_scheduler_type"] = "constant_with_warmup"
    done = trainer(tmp_path, new_model("gpt2"), max_steps=5, **options)
    done.train()
    assert rates_of(done) == [0, 0.25, 0.5, 0.75, 1]
    ours = parse_arguments("--lr 1 --warmup_steps 4 --lr_scheduler constant".split()).training
    assert [learning_rate(n, 5, ours) for n in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1])


def test_the_rate_and_the_loss_after_a_resume_with_more_steps(tmp_path):
    options = {"learning_rate": 1.0, "lr_scheduler_type": "linear", "optim": "sgd"}
    save = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, new_model("gpt2"), max_steps=4, **options, **save).train()
    done = trainer(tmp_path, new_model("gpt2"), max_steps=8, **options)
    result = done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rates_of(done)[:3] == [0.5, 0.625, 0.5]
    ours = parse_arguments("--lr 1 --lr_scheduler linear".split()).training
    assert [learning_rate(n, 8, ours) for n in (2, 3, 4)] == [0.75, 0.625, 0.5]
    losses = [entry["loss"] for entry in done.state.log_history if "loss" in entry]
    assert result.training_loss == pytest.approx(np.mean(losses[2:]), rel=1e-5)


def test_the_second_epoch_of_a_seed_is_the_first_of_the_next(tmp_path):
    orders = {}
    for seed in (1, 2):
        read = []

        class Reading(Trainer):
            def training_step(self, model, inputs, *rest, _read=read):
                _read.append(int(inputs["input_ids"][0, 0]))
                return super().training_step(model, inputs, *rest)

        trainer(tmp_path, new_model("gpt2"), kind=Reading, num_train_epochs=2, seed=seed).train()
        orders[seed] = read
    assert orders[1][4:] == orders[2][:4]
    empty = np.zeros((99, 3), dtype=np.int64)
    ours = Sequences((), empty, np.arange(1, 100), Padding(4, 4))
    assert ours.epoch_order(1, 2).tolist() != ours.epoch_order(2, 1).tolist()


def test_auto_find_batch_size_takes_nine_tenths_and_the_global_batch_shrinks(tmp_path):
    """test_auto_micro_batch.py has ours: half of the micro-batch, twice the accumulation."""
    sizes = []

    class Small(GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, labels=None, **options):
            sizes.append(len(input_ids))
            if len(input_ids) > 6:
                raise RuntimeError("CUDA out of memory.")
            return super().forward(input_ids, labels=labels, **options)

    options = {"per_device_train_batch_size": 8, "auto_find_batch_size": True, "max_steps": 1}
    trainer(tmp_path, Small(CONFIGS["gpt2"]), ROWS * 3, **options).train()
    assert sizes == [8, 7, 6]


def numbers():
    for number in range(100):
        yield {"n": number}


def test_a_resumed_shuffled_stream_of_datasets_loses_its_buffer():
    """test_streaming.py has ours, which continues with the same sequences."""
    import datasets

    def stream():
        rows = datasets.IterableDataset.from_generator(numbers)
        return rows.shuffle(seed=0, buffer_size=1000)

    first = stream()
    rows = iter(first)
    read = [next(rows)["n"] for _ in range(7)]
    again = stream()
    again.load_state_dict(first.state_dict())
    rest = [row["n"] for row in again]
    assert len(read) == 7 and rest == []
