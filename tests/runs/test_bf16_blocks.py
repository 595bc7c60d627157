"""--bf16_blocks: dp computes as the strategies whose weights are in bf16, with fp32 weights."""

import pytest
from conftest import assert_close
from safetensors.torch import load_file

WORK = """
    --max_steps 6 --num_samples 24 --seq_length 32 --batch_size 2 --dropout 0 --precision bf16
    --no_eval
    """.split()
TWO = {"launcher": "torchrun", "ranks": 2}
BLOCKS = [*WORK, "--bf16_blocks"]


@pytest.fixture(scope="module")
def blocks(script):
    return script(*BLOCKS, "--save_every", "3", **TWO)


def test_two_ranks_train_the_same_model_as_one_and_as_zero2(script, blocks):
    assert_close(script(*BLOCKS, "--batch_size", "4").losses, blocks.losses, 1e-3)
    assert_close(script(*WORK, "--strategy", "zero2", **TWO).losses, blocks.losses, 1e-3)
    weights = load_file(blocks.folder / "hf/model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}
    # The ranks reduce fp32 gradients.
    sent = blocks.results["communication_per_step"]
    assert not [name for name in sent if "bfloat16" in name]


@pytest.mark.slow
def test_a_resume_is_exact_and_may_leave_the_flag_out(script, blocks):
    resume = ["--resume", next(blocks.folder.glob("checkpoints/*3"))]
    assert script(*BLOCKS, *resume, **TWO).losses == blocks.losses[3:]
    assert_close(script(*WORK, *resume, **TWO).losses, blocks.losses[3:], 1e-3)


@pytest.mark.slow
def test_compiled_blocks_have_the_same_losses(script):
    whole = [*BLOCKS, "--batch_size", "4"]
    assert_close(script(*whole, "--compile", timeout=600).losses, script(*whole).losses, 1e-3)


def test_a_run_in_fp32_is_refused(script):
    run = script(*BLOCKS, "--precision", "fp32", ok=False)
    assert run.code == 2 and "--bf16_blocks" in run.error and "fp32" in run.error
