# make demo   set up, then compare all strategies on the embedded model and text
# make ops    set up, then compile DeepSpeed's ops, for example on a cluster's login node
# make test   set up, then lint and test each promise once (about 10 minutes on 2 cores)
# make test-all   the rest: launchers, Slurm, several hosts, the documents' commands, the lower bounds
# make unit   the tests that start no training run (seconds)
# make test-lower-bounds   the unit tests and a run of each strategy with the oldest supported
#             releases, in .venv-lower (needs Python 3.10 or 3.11)
# make docs   build the documents as a site, in site/; broken links and anchors are errors
# make faults plant documented bugs one at a time, and run the check that shows each (15 minutes)
# make lab    tasks for students, which check themselves; LAB="start 1" adds arguments
# make soak   the full products and repeats (hours)
# make bench  measure speed and memory next to transformers.Trainer and accelerate; GPU=1 on a GPU
#
# TORCH=...   what pip installs for torch, for example TORCH="torch==2.6.0"; required on a machine
#             with an AMD GPU
PYTHON ?= python3
# Two files of tests at a time, each with half of the cores. PARALLEL= runs one test after the other.
# They come in the order of collection (tests/conftest.py), not by their number of tests.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
VENV   := .venv
BIN    := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Without a GPU, a CPU build of torch is installed if pip's own configuration offers one; it is much
# smaller. For an AMD GPU the user chooses the build, because PyPI has none for ROCm.
TORCH_PIN  := $(shell grep -E '^torch==' constraints.txt)
GPU_VENDOR := $(shell if test -e /dev/nvidiactl || test -e /dev/dxg; then echo nvidia; \
	elif test -e /dev/kfd || command -v rocminfo > /dev/null; then echo amd; else echo none; fi)
# $(call install-torch,PYTHON,RELEASE)
ifeq ($(GPU_VENDOR),none)
install-torch = $(1) -m pip install -q "$(2)+cpu" 2>/dev/null || $(1) -m pip install -q "$(2)"
else
install-torch = $(1) -m pip install -q "$(2)"
endif
LOWER := .venv-lower/bin/python
# --use-pep517: pip 23 and 24 print a deprecation for DeepSpeed's setup.py otherwise.

.PHONY: setup setup-dev demo ops unit test test-all test-lower-bounds lint docs faults lab soak bench clean

setup: $(VENV)/installed
setup-dev: $(VENV)/installed-dev

REQUIREMENTS := requirements.txt $(wildcard requirements/*.txt) constraints.txt
$(VENV)/installed: $(REQUIREMENTS)
ifeq ($(GPU_VENDOR)$(TORCH),amd)
	@echo 'An AMD GPU was found: choose the build of torch. For ROCm, with the version that is installed here:' >&2
	@echo '  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/rocm6.4 make setup TORCH="torch==2.8.0+rocm6.4"' >&2
	@echo 'To train on the CPU:' >&2
	@echo '  export CUDA_VISIBLE_DEVICES=-1; make setup TORCH="$(TORCH_PIN)"' >&2
	@exit 1
endif
	@echo "== Setting up $(VENV) (1 to 3 minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifdef TORCH
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q --use-pep517 -r requirements.txt
else
	$(call install-torch,$(BIN)/python,$(TORCH_PIN))
	$(BIN)/python -m pip install -q --use-pep517 -r requirements.txt -c constraints.txt
endif
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@echo "== Installing the dependencies of the tests"
	$(BIN)/python -m pip install -q --use-pep517 -r requirements-dev.txt $(if $(TORCH),,-c constraints.txt)
	@touch $@

demo: setup
	@echo "== Comparing the strategies on the embedded model (about 3 minutes on 2 cores; the first time 2 more, to compile DeepSpeed's ops)"
	PYTHON=$(BIN)/python bash compare_strategies.sh

ops: setup
	$(BIN)/python scripts/build_ops.py

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files | grep -E '\.(sh|slurm)$$|^\.ci/run$$' | xargs -r $(BIN)/shellcheck
	$(BIN)/hadolint Dockerfile

docs: setup-dev
	$(BIN)/mkdocs build --strict

test: setup-dev lint docs
	@echo "== Running the tests (skips are listed with their reasons at the end)"
	$(BIN)/python -m pytest -m "not slow and not soak" $(PARALLEL)

test-all: setup-dev
	@echo "== Running the slow tests (skips are listed with their reasons at the end)"
	$(BIN)/python -m pytest -m "slow and not soak" $(PARALLEL)
	FAIL_ON_SKIP= $(MAKE) test-lower-bounds  # some tests need newer releases

unit: setup-dev
	$(BIN)/python -m pytest -q -m "not soak" tests/unit

EQUAL := tests/runs/test_equality.py::test_two_ranks_with_accumulation_equal_one_process_in_fp32
# One run of each strategy on two ranks with gradient accumulation, with the losses and the gradient
# norms of one process. fsdp and infinity need newer releases on a CPU. The import of torch 2.6's
# compiler starts threads for several compile jobs, and tests/helpers/preloaded_server.py, which
# forks after it, cannot have threads.
test-lower-bounds:
	@echo "== Testing the lower bounds of requirements.txt"
	@test -x $(LOWER) || $(PYTHON) -m venv .venv-lower
	$(call install-torch,$(LOWER),$(shell grep -E '^torch==' constraints-lower.txt))
	$(LOWER) -m pip install -q --use-pep517 -r requirements.txt peft tensorboard pytest -c constraints-lower.txt
	PATH="$(CURDIR)/.venv-lower/bin:$$PATH" TORCHINDUCTOR_COMPILE_THREADS=1 $(LOWER) -m pytest -q -m "not soak" tests/unit \
		$(EQUAL) --deselect "$(EQUAL)[fsdp]" --deselect "$(EQUAL)[infinity]"

# docs/FAULTS.md, its figure and tools/faults/results.json are renewed if all faults are caught.
faults: setup-dev
	$(BIN)/python -m tools.faults --write

lab: setup
	@$(BIN)/python -m tools.lab $(LAB)

soak: setup-dev
	$(BIN)/python -m pytest -m soak $(PARALLEL)

# BENCH=... adds options, such as BENCH="--keep --cases one", which tools/benchmarks/peers.py has.
bench: setup
	$(BIN)/python -m tools.benchmarks.peers --write $(if $(GPU),--gpu) $(BENCH)

clean:
	rm -rf $(VENV) .venv-lower site build .mypy_cache .pytest_cache .ruff_cache
