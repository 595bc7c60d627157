# make demo   set up, then compare all strategies on the embedded model and text
# make test   set up, then lint and run every test once (48 minutes on 2 shared cores)
# make unit   the tests that start no process (seconds)
# make soak   the full products and repeats, and every attack (hours)
# make bench  measure speed and memory next to transformers.Trainer and accelerate; GPU=1 on a GPU
#
# TORCH=...   what pip installs for torch, for example TORCH="torch==2.6.0"
PYTHON ?= python3
# Two files of tests at a time, each with half of the cores. PARALLEL= runs one test after the other.
# They come in the order of collection (tests/conftest.py), not by their number of tests.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
VENV   := .venv
BIN    := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Without an NVIDIA GPU, a CPU build of torch is installed if pip's own configuration offers one; it is much smaller.
TORCH_PIN := $(shell grep -E '^torch==' constraints.txt)
CPU_ONLY  := $(shell test -e /dev/nvidiactl || test -e /dev/dxg || echo yes)

.PHONY: setup setup-dev demo unit test lint soak bench clean

setup: $(VENV)/installed
setup-dev: $(VENV)/installed-dev

$(VENV)/installed: requirements.txt constraints.txt
	@echo "== Setting up $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef TORCH
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -r requirements.txt
else
ifeq ($(CPU_ONLY),yes)
	$(BIN)/python -m pip install -q "$(TORCH_PIN)+cpu" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH_PIN)"
else
	$(BIN)/python -m pip install -q "$(TORCH_PIN)"
endif
	$(BIN)/python -m pip install -q -r requirements.txt -c constraints.txt
endif
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@echo "== Installing the dependencies of the tests"
	$(BIN)/python -m pip install -q -r requirements-dev.txt $(if $(TORCH),,-c constraints.txt)
	@touch $@

demo: setup
	@echo "== Comparing the strategies on the embedded model (2 to 4 minutes, and some more the first time, to compile DeepSpeed's ops)"
	PYTHON=$(BIN)/python bash compare_strategies.sh

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files | grep -E '\.(sh|slurm)$$|^\.ci/run$$' | xargs -r $(BIN)/shellcheck

test: setup-dev lint
	@echo "== Running the tests (skips are listed with their reasons at the end)"
	$(BIN)/python -m pytest -m "not soak" $(PARALLEL)

unit: setup-dev
	$(BIN)/python -m pytest -q -m "not soak" tests/unit

soak: setup-dev
	$(BIN)/python -m pytest -m "soak or attack" $(PARALLEL)

# BENCH=... adds options, such as BENCH="--rounds 5 --cases one"; benchmarks/peers.py describes them.
bench: setup
	$(BIN)/python -m benchmarks.peers --write $(if $(GPU),--gpu) $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
