"""Attacks on the arguments and settings of compare_strategies.sh."""

import pytest
from conftest import PROJECT

from support.cli.flags import RENAMED

MODELS = [
    "a b",
    "it's",
    '"x"; touch executed',
    "$(touch executed)",
    "`touch executed`",
    "a\ntouch executed",
    "*",
    "-x",
    "../../up",
]

SETTINGS = {
    "NUM_GPUS": "a[$(touch executed)]",
    "SIMULATE_GPUS": "1;touch executed",
    "REPEATS": "1+1",
    "RESUME": "a[$(touch executed)]",
    "TIMEOUT": "9" * 20,
    "CONTROL": "yes",
    "STRATEGIES": "dp $(touch executed)",
}


def other_names(*flags: str) -> list[str]:
    return [f"--{name}" for flag in flags for name in RENAMED[flag]]


@pytest.fixture
def compare(stubs, tmp_path):
    """compare(*args, env) runs compare_strategies.sh with a stub for Python."""
    stubs.write(
        "python",
        """case "$*" in *matplotlib*) printf '0\\nfacts\\n' ;; *free_port*) echo 1 ;; esac""",
    )

    def run(*args, env=None):
        env = {
            "STRATEGIES": "dp",
            "CONTROL": "0",
            "PYTHON": str(stubs.bin / "python"),
            **(env or {}),
        }
        done = stubs.run(["bash", PROJECT / "compare_strategies.sh", *args], tmp_path, env)
        assert not list(tmp_path.rglob("executed")) and {
            path.name for path in tmp_path.iterdir()
        } <= {"comparison_runs"}
        return done

    return run


@pytest.mark.attack
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_the_comparison_is_a_name(compare, stubs, model):
    assert compare(model, f"--dataset={model}").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert call[call.index("--model") + 1] == model and f"--dataset={model}" in call


@pytest.mark.attack
@pytest.mark.parametrize(
    "flag",
    [
        *("--deepspeed=x", "--use_fsdp", "--fsdp", "--prefetch", "--show_sample"),
        *other_names("model", "ds_config", "overwrite"),
    ],
)
def test_the_comparison_refuses_other_names_of_what_it_sets(compare, stubs, flag):
    run = compare("x", flag)
    assert run.code == 2 and flag.partition("=")[0] in run.error and stubs.calls("python") == []


@pytest.mark.attack
@pytest.mark.parametrize("flag", ["--max_steps", *other_names("epochs", "num_samples")])
def test_the_comparison_leaves_the_length_to_the_arguments(compare, stubs, flag):
    assert compare("x", flag, "7").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert ("--max_steps" in call) == (flag == "--max_steps")


@pytest.mark.attack
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_comparison_is_refused(compare, stubs, name):
    run = compare("x", env={name: SETTINGS[name]})
    assert run.code == 2 and name in run.error and stubs.calls("python") == []
