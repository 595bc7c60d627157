"""--reduce_dtype: the ranks send gradients in it, and the losses stay those of the model."""

import json

import pytest
from conftest import assert_close, slow, soak

WORK = """
    --max_steps 2 --seq_length 32 --batch_size 2 --dropout 0 --no_eval --no_export
    --precision fp32
    """.split()
REDUCTIONS = ("all_reduce", "reduce_scatter")


@pytest.fixture(scope="module")
def reduced(script):
    """reduced(strategy, dtype) -> (losses, bytes of the reduction by dtype) of two ranks."""

    def run(strategy, dtype):
        flags = ["--reduce_dtype", dtype] if dtype else []
        done = script(*WORK, "--strategy", strategy, *flags, launcher="torchrun", ranks=2)
        sent = {
            name.split()[1]: traffic["sent_bytes"]
            for name, traffic in done.results["communication_per_step"].items()
            # Not the counts of tokens, the loss and the norm.
            if name.startswith(REDUCTIONS) and traffic["message_bytes"] > 1000
        }
        return done, sent

    return run


@pytest.mark.parametrize(
    "strategy",
    ["dp", "zero2", "fsdp", slow("zero3"), soak("zero1"), soak("offload"), soak("infinity")],
)
def test_half_of_the_bytes_are_sent_in_16_bits(reduced, strategy):
    done, sent = reduced(strategy, "bf16")
    P = done.results["trainable_parameters"]
    # A rank of two sends half of the tensor in a reduce-scatter, and all of it in an all-reduce.
    volume = 1 if done.results["strategy"] in ("zero3", "infinity", "fsdp") else 2
    assert {*sent} == {"bfloat16"}
    assert sent["bfloat16"] == pytest.approx(2 * P * volume / 2, rel=0.01)
    predicted = done.results["memory"]["predicted_bytes"]["sent"]
    assert predicted == pytest.approx(done.results["communication_bytes_per_step"], rel=0.15)
    assert done.results["run_signature"]["told"]["reduce_dtype"] == "bf16"


def test_losses_agree_and_fp16_is_explained(reduced):
    done, sent = reduced("dp", "fp16")
    exact, _ = reduced("dp", None)
    assert {*sent} == {"float16"}
    assert_close(done.losses, exact.losses, 1e-4)
    assert "small gradients become 0" in done.out and "small gradients" not in exact.out


def test_one_rank_and_a_simulation_accept_it(script, tmp_path):
    flags = [*WORK, "--reduce_dtype", "fp16"]
    alone = script(*flags)
    assert alone.results["status"] == "completed" and "small gradients" not in alone.out
    simulated = script(*flags, "--strategy", "dp", "--simulate_gpus", "2")
    assert simulated.results["status"] == "completed"


def test_the_command_line_and_file_cannot_contradict(script, tmp_path):
    (file := tmp_path / "fsdp.json").write_text(json.dumps({"fsdp_reduce_dtype": "BF16"}))
    fsdp = ["--strategy", "fsdp", "--fsdp_config", file]
    run = script(*fsdp, "--reduce_dtype", "fp32", ok=False)
    assert run.code == 2 and "contradicts fsdp_reduce_dtype" in run.error
