"""Attacks on the arguments and settings of compare_strategies.sh."""

import pytest
from conftest import PROJECT

from support.cli.flags import RENAMED

MODELS = ["a b", "it's", '"x"; touch executed', "$(touch executed)", "a\ntouch executed", "*", "-x"]
SETTINGS = {
    "NUM_GPUS": "a[$(touch executed)]",
    "REPEATS": "1+1",
    "TIMEOUT": "9" * 20,
    "CONTROL": "yes",
    "STRATEGIES": "dp $(touch executed)",
}


@pytest.fixture
def compare(stubs, tmp_path):
    """compare(*args, env) runs compare_strategies.sh with a stub for Python."""
    stubs.write(
        "python",
        """case "$*" in *matplotlib*) printf '0\\nfacts\\n' ;; *free_port*) echo 1 ;; esac""",
    )

    def run(*args, env=None):
        defaults = {"STRATEGIES": "dp", "CONTROL": "0", "PYTHON": str(stubs.bin / "python")}
        script = PROJECT / "compare_strategies.sh"
        done = stubs.run(["bash", script, *args], tmp_path, defaults | (env or {}))
        assert not list(tmp_path.rglob("executed"))
        assert {path.name for path in tmp_path.iterdir()} <= {"comparison_runs"}
        return done

    return run


@pytest.mark.attack
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_the_comparison_is_a_name(compare, stubs, model):
    assert compare(model, f"--dataset={model}").code == 0
    [call] = [call for call in stubs.calls("python") if "torch.distributed.run" in call]
    assert call[call.index("--model") + 1] == model and f"--dataset={model}" in call


OTHER_NAMES = [
    f"--{name}" for flag in ("model", "ds_config", "overwrite") for name in RENAMED[flag]
]


@pytest.mark.attack
@pytest.mark.parametrize("flag", ["--deepspeed=x", "--fsdp", "--prefetch", *OTHER_NAMES])
def test_the_comparison_refuses_other_names_of_what_it_sets(compare, stubs, flag):
    run = compare("x", flag)
    assert run.code == 2 and flag.partition("=")[0] in run.error and stubs.calls("python") == []


@pytest.mark.attack
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_comparison_is_refused(compare, stubs, name):
    run = compare("x", env={name: SETTINGS[name]})
    assert run.code == 2 and name in run.error and stubs.calls("python") == []
