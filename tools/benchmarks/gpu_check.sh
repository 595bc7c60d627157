#!/usr/bin/env bash
# Check this project on the GPU of this machine; tools/benchmarks/gpu_check.py says what is checked.
#
#   bash tools/benchmarks/gpu_check.sh correctness    # at most five minutes
#   bash tools/benchmarks/gpu_check.sh speed          # at most five minutes
#   bash tools/benchmarks/gpu_check.sh                # both
#   bash tools/benchmarks/gpu_check.sh --help
#
# PYTHON=python3.12 names another interpreter than the active environment's, or .venv's.
set -euo pipefail

project=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON-}
if [[ -z $python && -z ${VIRTUAL_ENV-}${CONDA_PREFIX-} && -x $project/.venv/bin/python ]]; then
    python=$project/.venv/bin/python
fi
PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} exec "${python:-python3}" -m tools.benchmarks.gpu_check "$@"
