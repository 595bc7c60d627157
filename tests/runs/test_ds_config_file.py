"""The configuration that a DeepSpeed run writes trains the same model."""

import json


def test_written_configuration_runs_as_it_is(script):
    work = ["--max_steps", "3", "--seq_length", "32", "--no_eval", "--no_export"]
    flags = ["--batch_size", "2", "--gradient_accumulation_steps", "2", "--lr", "1e-3"]
    more = ["--adam_beta2", "0.95", "--weight_decay", "0.1", "--max_grad_norm", "0.5"]
    first = script(*work, *flags, *more, "--strategy", "zero2", "--precision", "bf16")
    file = first.folder / "ds_config.json"
    config = json.loads(file.read_text())
    assert "auto" not in file.read_text()
    assert config["timers"] == {"throughput": {"enabled": False}}
    again = script(*work, "--ds_config", file)
    assert again.losses == first.losses and len(first.losses) == 3
    assert again.results["strategy"] == "zero2" and again.results["precision"] == "bf16"
