"""The command lines in the README of transformers' run_clm.py run unchanged."""

import pytest

pytestmark = pytest.mark.slow


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
