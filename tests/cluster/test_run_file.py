"""A run file sets what the command line does not, and --print_config prints another one."""


def test_run_file(script, run_file, tmp_path):
    zeros = ["--seed", "0", "--max_grad_norm", "0", "--weight_decay", "0"]
    given = ["--lr", "2e-3", *zeros, "--report_to", "tensorboard"]
    shown = script("--config", run_file / "config.yaml", *given, "--print_config").out
    for zero in ("seed", "max_grad_norm", "weight_decay", "dropout"):
        assert f"\n{zero}: 0" in shown
    assert "lr: 0.002  # --lr" in shown  # the command line wins
    assert "strategy: zero1" in shown and "precision: fp32" in shown
    (tmp_path / "again.yaml").write_text(shown)
    again = script("--config", tmp_path / "again.yaml", "--print_config").out
    values, again = (
        [line.partition("  #")[0] for line in text.splitlines() if "output_dir" not in line]
        for text in (shown, again)
    )
    assert again == values
