"""--optim muon under ZeRO, which cuts the matrices: the same updates, and the same states."""

import shutil

import pytest
from conftest import assert_close, slow

STEPS = "--seq_length 32 --max_steps 8 --no_eval --no_export --precision fp32 --dropout 0".split()
# A larger rate amplifies rounding: the iterations of Muon scale small singular values up.
MUON = "--from_scratch --optim muon --lr 2e-4 --gradient_accumulation_steps 2".split()


@pytest.fixture(scope="module")
def one_block(tmp_path_factory, tiny_tokenizer):
    """A Llama of one block: of its matrices one is cut on two ranks, and two on three ranks."""
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("llama") / "one-block"
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    LlamaConfig(**sizes, **heads, **special).save_pretrained(folder)
    return shutil.copytree(tiny_tokenizer, folder, dirs_exist_ok=True)


@pytest.fixture(scope="module")
def train(script, one_block, text_file):
    """train(strategy, ranks, *args) trains the same global batches on any number of ranks."""
    args = [*STEPS, *MUON, "--model", one_block, "--dataset", text_file]

    def run(strategy, ranks, *more):
        options = {"launcher": "torchrun", "ranks": ranks} if ranks > 1 else {}
        return script(*args, "--strategy", strategy, "--batch_size", 6 // ranks, *more, **options)

    return run


@pytest.fixture(scope="module")
def whole(train):
    """8 steps under dp in one process, with a checkpoint at step 4."""
    return train("dp", 1, "--save_every", "4")


def norms(run):
    return [record["grad_norm"] for record in run.metrics if "loss" in record]


def checkpoint(run, step):
    return run.folder / "checkpoints" / f"step-{step:08d}"


CASES = [
    ("zero2", 2),
    *(slow(name, 2) for name in ("zero1", "zero3", "offload", "fsdp", "dp")),
    *(slow(name, 3) for name in ("zero1", "zero2", "zero3", "offload", "fsdp")),
]


@pytest.mark.parametrize("strategy, ranks", CASES)
def test_muon_makes_the_same_updates(train, whole, strategy, ranks):
    assert whole.losses[-1] < whole.losses[0] - 0.02
    run = train(strategy, ranks)
    assert_close(run.losses, whole.losses, 1e-5)
    assert_close(norms(run), norms(whole), 1e-5)
    # q and o 64 × 64, k and v 32 × 64, three of 160 × 64; embeddings of 300 × 64, three norms.
    assert "Muon updates 43,008 parameters, AdamW 38,592" in run.out


@pytest.mark.slow
@pytest.mark.parametrize("strategy, ranks", [("zero1", 2), ("zero2", 3), ("zero3", 3)])
def test_muon_resumes_exactly(train, strategy, ranks):
    run = train(strategy, ranks, "--save_every", "4")
    then = train(strategy, ranks, "--resume", checkpoint(run, 4))
    assert then.losses == run.losses[4:] and norms(then) == norms(run)[4:]


@pytest.mark.slow
def test_muon_continues_under_another_strategy_and_number_of_ranks(train, whole):
    """A step of each of them: dp → zero2 → zero3 → fsdp → dp."""
    run = whole
    for step, place in enumerate([("zero2", 2), ("zero3", 3), ("fsdp", 2), ("dp", 1)], 4):
        run = train(*place, "--save_every", "1", "--resume", checkpoint(run, step))
        assert_close(run.losses, whole.losses[step:], 1e-5)
        assert_close(norms(run), norms(whole)[step:], 1e-5)


@pytest.mark.slow
def test_round_robin_gradients_are_in_another_order(train, whole, tmp_path):
    """DeepSpeed then flattens the parameters in this order; checkpoints and exports follow it."""
    file = tmp_path / "round_robin.json"
    file.write_text('{"zero_optimization": {"stage": 2, "round_robin_gradients": true}}')
    run = train("zero2", 2, "--ds_config", file, "--save_every", "4")
    assert_close(run.losses, whole.losses, 1e-5)
    then = train("dp", 1, "--resume", checkpoint(run, 4))
    assert_close(then.losses, whole.losses[4:], 1e-5)
