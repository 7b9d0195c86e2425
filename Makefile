# Everything runs from a virtual environment that the first target to need it sets up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds torch when you want the small CPU build: make run TORCH_INDEX=<PyTorch's CPU wheel index>
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
OMP := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0

.PHONY: help run test check lint bench bench-sim bench-cache bench-policies gpu-check kernel-grid venv dev clean
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

run: $(VENV)/.engine ## engine and daemon on the bundled model under a bursty load, with a summary at the end
	$(OMP) $(BIN)/autotune run $(ARGS)

test: $(VENV)/.dev ## the test suite
	$(OMP) $(BIN)/python -m pytest $(ARGS)

check: lint test ## linters, types, import layers, then the tests

lint: $(VENV)/.dev ## ruff, mypy --strict, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/kernels
	$(BIN)/lint-imports

bench: $(VENV)/.engine ## kernel benchmark; the last line is JSON
	$(OMP) $(BIN)/python -m kernels.bench $(ARGS)

# Texts and traces are yours: make bench-cache TEXT=FOLDER TRACES=FOLDER. Rows that lack theirs are null.
TEXT ?=
TRACES ?=
bench-cache: $(VENV)/.engine ## cache benchmark [TEXT=DIR TRACES=DIR ARGS=--quick]; the last line is JSON
	@$(OMP) $(BIN)/python -m engine.cache_bench --text "$(TEXT)" --traces "$(TRACES)" $(ARGS)

bench-sim: $(VENV)/.engine ## how fast and how true the simulator is; the last line is JSON
	$(OMP) $(BIN)/python -m envs.bench_sim $(ARGS)

# The held-out workloads, and a trace of yours: make bench-policies TRACE=FILE. Hours; ARGS="--seeds 2 --duration 150" is short.
TRACE ?=
bench-policies: $(VENV)/.engine ## policies on held-out workloads [TRACE=FILE ARGS=...]; the last line is JSON
	@$(OMP) $(BIN)/autotune evaluate --json-line -o run/bench-policies --random 8 --oracle-seeds 1 --constant-hours 1 $(if $(TRACE),--trace "$(TRACE)") $(ARGS)

# On a GPU machine: its own Python (torch, triton, numpy), nothing is installed.
gpu-check: ## Triton kernels on this machine's GPU: checked, then timed; under 6 minutes
	$(PYTHON) -m kernels.gpu_check --out docs/results/gpu_check $(ARGS)

kernel-grid: $(VENV)/.dev ## Triton kernels under the interpreter at every shape (half an hour and more)
	TRITON_INTERPRET=1 $(OMP) $(BIN)/python -m pytest -m slow --timeout 600 tests/kernels/test_triton_grid.py $(ARGS)

venv: $(VENV)/.engine ## what `make run` needs
dev: $(VENV)/.dev ## what tests and linters need

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "kv-autotune needs Python 3.11 to 3.13; say which with make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3-venv is missing: install it, then retry" >&2; exit 1; }

$(VENV)/.engine: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(TORCH_INDEX),$(PIP) install --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(PIP) install -c constraints.txt -e '.[engine]'
	@$(BIN)/python -m autotune.venv_check
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(if $(TORCH_INDEX),$(PIP) install --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(PIP) install -c constraints.txt -e '.[engine,train,dev]'
	@$(BIN)/python -m autotune.venv_check
	@touch $@ $(VENV)/.engine

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis run
