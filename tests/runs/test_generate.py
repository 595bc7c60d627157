"""--generate several times and at each evaluation: under every strategy, without a trace in the training."""

import pytest
from conftest import SMALL, STRATEGIES, slow

WORK = (
    "--seq_length 32 --max_steps 4 --eval_every 2 --eval_samples 4 --batch_size 2 --lr 1e-2".split()
)
WORK += "--dropout 0.1 --logging_steps 1".split()
# Long ones: the model has 64 positions, so that few tokens are generated.
PROMPTS = [
    "the lazy dog jumps over the quick brown fox",
    "The lazy dogs jump over a quick, brown fox and do it again",
]
GENERATES = [*(word for text in PROMPTS for word in ("--generate", text)), "--generate_every_eval"]
TWO = {"launcher": "torchrun", "ranks": 2}
CASES = [("dp", "fp32"), *(slow(name, "fp32") for name in STRATEGIES if name != "dp")]
CASES += [slow("fsdp", "bf16"), slow("infinity", "bf16"), slow("zero3", "bf16")]


@pytest.mark.parametrize("strategy, precision", CASES)
def test_texts_at_evaluations_do_not_change_the_training(script, small_gpt2, strategy, precision):
    """The losses are equal bit for bit, with dropout."""
    work = [*SMALL, "--model", small_gpt2, *WORK, "--precision", precision, "--strategy", strategy]
    plain = script(*work, "--no_export", **TWO)
    run = script(*work, "--no_export", *GENERATES, "--report_to", "tensorboard", **TWO)
    assert run.losses == plain.losses and len(run.losses) == 4
    texts = [record for record in run.metrics if "generated" in record]
    assert [record for record in run.metrics if record not in texts and "loss" not in record] == [
        record for record in plain.metrics if "loss" not in record
    ]
    assert [record["step"] for record in texts] == [2, 4]
    for record in texts:
        assert [entry["prompt"] for entry in record["generated"]] == PROMPTS
        for entry in record["generated"]:
            assert entry["text"].startswith(entry["prompt"]) and f"💬 {entry['text']}" in run.out
    assert texts[0]["generated"] != texts[-1]["generated"]  # the weights have changed
    # The last evaluation has the weights of the end.
    assert run.results["generated"] == texts[-1]["generated"]
    assert run.results["sample"] == texts[-1]["generated"][0]["text"]
    assert run.results["flags"]["generate"] == PROMPTS
    assert run.results["communication_per_step"] == plain.results["communication_per_step"]
    [events] = (run.folder / "tensorboard").iterdir()
    content = events.read_bytes()
    assert all(f"generated/{n}".encode() in content for n in (1, 2))
    assert texts[0]["generated"][1]["text"].encode() in content


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [[], ["--streaming", "--shuffle_buffer", "4"]], ids=["", "streamed"]
)
def test_conversations_are_answered_at_evaluations(script, llama, tmp_path, how):
    turns = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "the dog"}]
    import json

    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 16)
    work = ["--model", llama, "--dataset", tmp_path / "rows.jsonl", "--precision", "fp32", *how]
    work += "--seq_length 64 --max_steps 4 --eval_every 2 --batch_size 1 --no_export".split()
    work += ["--validation_file", tmp_path / "rows.jsonl", "--generate", "the fox?"]
    run = script(*work, "--generate_every_eval", "--strategy", "zero3", **TWO)
    texts = [record["generated"][0] for record in run.metrics if "generated" in record]
    assert len(texts) == 2 and all("the fox?" not in entry["text"] for entry in texts)
    assert texts[-1]["text"] == run.results["sample"]


@pytest.mark.slow
def test_a_resume_repeats_no_text(script, small_gpt2):
    """The evaluation of the checkpoint's own step is made again, and its texts as well."""
    work = [*SMALL, "--model", small_gpt2, *WORK, "--precision", "fp32", *GENERATES, "--no_export"]
    whole = script(*work, "--save_every", "2")
    written = whole.metrics
    again = script(
        *work,
        "--resume",
        whole.folder / "checkpoints" / "step-00000002",
        "--output_dir",
        whole.folder,
        folder=whole.folder,
    )
    facts = [{k: v for k, v in r.items() if "second" not in k} for r in again.metrics]
    assert facts == [{k: v for k, v in r.items() if "second" not in k} for r in written]
