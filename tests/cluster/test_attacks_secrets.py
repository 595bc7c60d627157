"""No secret of the environment is printed or written."""

import pytest
from generated_scripts import SECRETS


@pytest.mark.attack
def test_no_secret_in_errors_settings_and_tracebacks(monkeypatch, capfd):
    from support.cli.hub import answers
    from support.cli.parse import parse_arguments
    from support.errors import UserError, explain, print_traceback

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for kind, name in [
        (UserError, "HF_ENDPOINT"),
        (OSError, "HF_ENDPOINT"),
        (ValueError, "HF_TOKEN"),
        (RuntimeError, "MY_PASSWORD"),
    ]:
        error = kind(f"{SECRETS[name]} is wrong")
        assert "canary" not in str(explain(error)).lower()
        print_traceback(error)
    assert not answers(SECRETS["HF_ENDPOINT"])
    assert parse_arguments(["--model", "gpt2"]).model == "gpt2"
    out, err = capfd.readouterr()
    assert "canary" not in (out + err).lower() and "ValueError" in err


@pytest.mark.attack
@pytest.mark.parametrize(
    "args",
    [
        ("--model", "gpt2"),
        ("--model", "gpt2", "--verbose"),
        ("--print_config",),
        ("--model", "http://u:canary@host/x", "--print_config"),
    ],
    ids=str,
)
def test_no_secret_is_printed_before_the_start(script, tmp_path, args):
    """The hub's address is part of the message that it cannot be reached."""
    run = script(*args, env={**SECRETS, "HF_HOME": tmp_path / "empty", "NO_PROXY": "*"}, ok=False)
    assert "canary" not in (run.out + run.err).lower()
    assert run.code == (0 if "--print_config" in args else 2), run.err


@pytest.mark.attack
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_no_secret_in_any_file_of_a_run(script, tmp_path, strategy):
    env = {
        **SECRETS,
        "HTTPS_PROXY": "http://me:canary@127.0.0.1:8",
        "WANDB_MODE": "offline",
        "HF_HOME": tmp_path / "home",
    }
    run = script(
        *f"--strategy {strategy} --num_samples 8 --seq_length 32 --no_eval --save_every 1".split(),
        *f"--report_to tensorboard,wandb --verbose --profile {tmp_path / 'trace'}".split(),
        env=env,
    )
    files = [
        path for folder in (run.folder, tmp_path) for path in folder.rglob("*") if path.is_file()
    ]
    assert {"README.md", "results.json", "manifest.json", "trace-rank0.json"} <= {
        path.name for path in files
    }
    assert [path for path in files if b"canary" in path.read_bytes().lower()] == []
    assert "canary" not in (run.out + run.err).lower()
