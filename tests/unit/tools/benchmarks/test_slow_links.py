"""tools/benchmarks/slow_links.py: its run files and its table; the measurement needs root."""

from distributed_training.cli.parse import parse_arguments
from tools.benchmarks.slow_links import Measured, parse, table, write_run_file


def test_the_run_file_is_one_of_the_script(tmp_path):
    args = parse(["--strategy", "zero1", "--accumulation", "1,4", "--seq_length", "16"])
    assert (args.links, args.accumulation) == ([1000, 100], [1, 4])
    write_run_file(tmp_path / "run.yaml", args, 4, "default")
    settings = parse_arguments(["--config", str(tmp_path / "run.yaml")])
    assert settings.parallelism.strategy == "zero1" and settings.data.seq_length == 16
    assert settings.training.gradient_accumulation_steps == 4
    write_run_file(tmp_path / "run.yaml", args, 4, "bf16")
    assert '"reduce_dtype": "bf16"' in (tmp_path / "run.yaml").read_text()


def test_the_table_says_how_far_off_the_forecast_is():
    [*_, high, low] = table(
        [
            Measured(1000, "default", 1, 0.11, 0.4, forecast=6.0, measured=5.0),
            Measured(100, "default", 4, 0.011, 0.4, forecast=40.0, measured=50.0),
        ]
    ).splitlines()
    assert high.split()[-1] == "+20%" and low.split()[-1] == "-20%"
