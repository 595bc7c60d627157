"""The command lines in the README of transformers' run_clm.py run unchanged."""

import pytest

pytestmark = pytest.mark.slow

CLM = [
    *("--model_name_or_path", "openai-community/gpt2"),
    *("--dataset_name", "wikitext", "--dataset_config_name", "wikitext-2-raw-v1"),
    *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"),
    *("--do_train", "--do_eval"),
]


def test_its_command_on_wikitext(script, hub, tmp_path):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": tmp_path / "hf"}
    run = script(*CLM, "--max_train_samples", "24", env=env)  # all of them only take longer
    assert len(run.losses) == 3
    assert (run.results["model"], run.results["batch_size"]) == ("openai-community/gpt2", 8)
    assert run.results["dataset"]["name"] == "wikitext"
    assert run.results["eval_loss"] < run.losses[0]


def test_its_command_on_files(script, llama, text_file, tmp_path):
    validation = tmp_path / "validation.txt"
    validation.write_text(text_file.read_text()[:20_000])
    data = ["--train_file", text_file, "--validation_file", validation, "--block_size", "64"]
    run = script(
        *("--model_name_or_path", llama, "--do_train", "--do_eval", *data),
        *("--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"),
        *("--max_steps", "4"),
    )
    assert len(run.losses) == 4 and run.results["dataset"]["name"] == str(text_file)
    evaluated = script(  # without --do_train and --train_file
        *("--model_name_or_path", run.folder / "hf", "--do_eval", *data[2:]),
        *("--per_device_eval_batch_size", "3"),
    )
    assert evaluated.losses == []
    assert evaluated.results["eval_loss"] == pytest.approx(run.results["eval_loss"], rel=1e-3)
