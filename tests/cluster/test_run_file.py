"""A run file sets what the command line does not."""

import pytest


def test_run_file(script, run_file, tmp_path):
    zeros = ["--seed", "0", "--max_grad_norm", "0", "--weight_decay", "0"]
    given = ["--lr", "2e-3", *zeros, "--report_to", "tensorboard"]
    shown = script("--config", run_file / "config.yaml", *given, "--print_config").out
    assert all(
        f"\n{zero}: 0" in shown for zero in ("seed", "max_grad_norm", "weight_decay", "dropout")
    )
    assert (
        "strategy: zero1" in shown and "lr: 0.002" in shown and "precision: fp32" in shown
    )  # the command line wins
    (tmp_path / "again.yaml").write_text(
        "\n".join(line for line in shown.splitlines() if not line.startswith("output_dir"))
    )
    again = script("--config", tmp_path / "again.yaml", "--print_config").out
    assert [line for line in again.splitlines() if "output_dir" not in line] == (
        tmp_path / "again.yaml"
    ).read_text().splitlines()


@pytest.mark.parametrize(
    "text, said",
    [
        ("lerning_rate: 1", "did you mean learning_rate"),
        ("training:\n  batch_size: many", "--batch_size"),
        ("training: 3", "section"),
        ("lr: 1\ntraining:\n  learning_rate: 2", "set one flag"),
        ("use_deepspeed: true\nuse_fsdp: true", "both"),
        ("use_deepspeed: true", "deepspeed_config"),
        ("a: [", "line"),
        ("compile: 3", "compile"),
    ],
)
def test_run_file_that_is_wrong(script, tmp_path, text, said):
    (tmp_path / "run.yaml").write_text(text)
    run = script("--config", tmp_path / "run.yaml", ok=False)
    assert run.code == 2 and said in run.error
