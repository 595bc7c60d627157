#!/usr/bin/env bash
# release: transformers 5.23.0
# finding: A config writes rope_theta into the dictionary that the caller gave as rope_scaling or rope_parameters. A second config of the same dictionary then ignores its own rope_theta: 10,000 instead of 500,000.
# guess: The caller's dictionary is not changed, and each config has its own rope_theta.
# matters: A loop that builds several models from one scaling rule trains all but the first with wrong frequencies, and nothing reports it.
# instead: Give each config a copy: rope_scaling=dict(settings).
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install --quiet --no-compile transformers==5.23.0 torch==2.13.0
cd "$work"
HF_HOME=$work/home "$work/env/bin/python" - <<'PROGRAM' 2> errors || { cat errors; exit 1; }
import copy

from transformers import LlamaConfig, Qwen3Config

SETTINGS = {"rope_type": "linear", "factor": 2.0}


def thetas(name, give):
    """rope_theta of two configs, and the settings that were given to both."""
    settings = copy.deepcopy(SETTINGS)
    configs = [
        kind(**{name: give(settings)}, rope_theta=theta)
        for kind, theta in ((LlamaConfig, 10_000.0), (Qwen3Config, 500_000.0))
    ]
    return [config.rope_parameters["rope_theta"] for config in configs], settings


for name in ("rope_scaling", "rope_parameters"):
    shared, changed = thetas(name, lambda settings: settings)
    copied, unchanged = thetas(name, dict)
    print(f"{name}: rope_theta 10,000 and 500,000 become {shared} with one dictionary")
    print(f"  which is {changed} afterwards; with copies: {copied}")
    assert shared == [10_000.0, 10_000.0] and changed == {**SETTINGS, "rope_theta": 10_000.0}
    assert copied == [10_000.0, 500_000.0] and unchanged == SETTINGS
PROGRAM
echo "As found: the first config's rope_theta stays in the caller's dictionary."
