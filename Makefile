# Everything runs from a virtual environment that the first target to need it sets up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where pip finds torch when you want the small CPU build: make run TORCH_INDEX=<PyTorch's CPU wheel index>
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
OMP := OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0

.PHONY: help run test check lint bench bench-sim bench-cache bench-engine bench-peers bench-policies bench-daemon soak fuzz evidence browser-test gpu-check kernel-grid install uninstall venv dev clean
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

# The demonstration's journals and logs, of the last one only; with a model of yours and no --demo it is none.
SERVES = $(if $(filter --demo,$(ARGS)),,$(filter --model --model=%,$(ARGS)))
KEPT = $(if $(SERVES),,--run-dir run/demo)
run: $(VENV)/.engine ## engine and daemon on the bundled model under a bursty load, with a summary at the end
	$(OMP) $(BIN)/autotune run $(KEPT) $(ARGS)

# All of it goes to a process per core, at most 4, each with 2 GB of free memory. Tests that you choose run in one, whose
# start costs less; the slow ones want the machine for themselves. As you like: make test WORKERS=2 ARGS=tests/engine
FREE = $(shell awk '/^MemAvailable/ {print int($$2 / 2097152)}' /proc/meminfo)
CORES = $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
WORKERS ?= $(if $(ARGS),0,$(patsubst 1,0,$(firstword $(shell printf '%s\n' 4 $(CORES) $(FREE) | sort -n))))
test: $(VENV)/.dev ## the test suite, in parallel; or what you choose [ARGS=tests/engine WORKERS=2]
	$(OMP) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

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

bench-engine: $(VENV)/.engine ## how fast the engine is, row by row [ARGS=--quick]; the last line is JSON
	@$(OMP) $(BIN)/python -m engine.bench $(ARGS)

bench-peers: $(VENV)/.engine ## vLLM, llama.cpp and transformers against ours on two processors; installs them below run/peers
	@$(OMP) $(BIN)/python -m engine.bench_peers $(ARGS)

bench-sim: $(VENV)/.engine ## how fast and how true the simulator is; the last line is JSON
	$(OMP) $(BIN)/python -m envs.bench_sim $(ARGS)

# The held-out workloads, and a trace of yours: make bench-policies TRACE=FILE. Hours; ARGS="--seeds 2 --duration 150" is short.
TRACE ?=
bench-policies: $(VENV)/.engine ## policies on held-out workloads [TRACE=FILE ARGS=...]; the last line is JSON
	@$(OMP) $(BIN)/autotune evaluate --json-line -o run/bench-policies --random 8 --oracle-seeds 1 --constant-hours 1 $(if $(TRACE),--trace "$(TRACE)") $(ARGS)

bench-daemon: $(VENV)/.engine ## what the daemon costs and survives: kill -9, a month of ticks; 45 minutes [ARGS=--quick]; the last line is JSON
	@$(OMP) $(BIN)/python -m autotune.bench $(ARGS)

evidence: $(VENV)/.engine ## the literature's claims, each measured here; writes docs/evidence.md [TEXT=DIR TRACES=DIR]; half an hour
	@$(OMP) $(BIN)/python -m autotune.evidence --text "$(TEXT)" --traces "$(TRACES)" --page docs/evidence.md $(ARGS)

HOURS ?= 2
soak: $(VENV)/.engine ## hours at the highest load this machine sustains, knobs turned at random [HOURS=2]; the last line is JSON
	@$(OMP) $(BIN)/python -m autotune.bench.soak --hours $(HOURS) $(ARGS)

MINUTES ?= 30
fuzz: $(VENV)/.fuzz ## schemathesis against all HTTP, random files against all readers [MINUTES=30]; the last line is JSON
	@$(OMP) $(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) --schemathesis $(BIN)/schemathesis $(ARGS)

# Pictures of the page: make browser-test SCREENSHOTS=run/pictures
SCREENSHOTS ?=
browser-test: $(VENV)/.browser ## the daemon's page in headless Chromium (Debian: chromium) [SCREENSHOTS=DIR]
	SCREENSHOTS="$(SCREENSHOTS)" $(BIN)/python -m pytest -m slow tests/autotune/test_dashboard_browser.py $(ARGS)

# On a GPU machine: its own Python (torch, triton, numpy), nothing is installed.
gpu-check: ## Triton kernels on this machine's GPU: checked, then timed; under 6 minutes
	$(PYTHON) -m kernels.gpu_check --out docs/results/gpu_check $(ARGS)

kernel-grid: $(VENV)/.dev ## Triton kernels under the interpreter at every shape (half an hour and more)
	TRITON_INTERPRET=1 $(OMP) $(BIN)/python -m pytest -m slow --timeout 600 tests/kernels/test_triton_grid.py $(ARGS)

# Units, example configuration and documentation, nothing else. PREFIX is where the program's virtual environment is or
# will be; DESTDIR is put before every path (packagers). GPU=1 lets the engine see NVIDIA devices.
PREFIX ?= /opt/kv-autotune
DESTDIR ?=
GPU ?=
UNITS := autotune-engine.service autotune.service autotune-train.service autotune-train.timer
UNITDIR := $(DESTDIR)/etc/systemd/system
SYSTEMD_VERSION = $(shell systemctl --version 2>/dev/null | awk 'NR==1 {print $$2+0}')
install: ## units and example configuration for systemd [DESTDIR= PREFIX=/opt/kv-autotune GPU=1]
	@for unit in $(UNITS); do install -d $(UNITDIR) && \
	  sed 's#/opt/kv-autotune#$(PREFIX)#g' systemd/$$unit > $(UNITDIR)/$$unit && chmod 644 $(UNITDIR)/$$unit || exit 1; done
	@install -D -m 644 systemd/autotune.preset $(DESTDIR)/usr/lib/systemd/system-preset/50-kv-autotune.preset
	@install -D -m 644 systemd/autotune.sysusers $(DESTDIR)/usr/lib/sysusers.d/kv-autotune.conf
	@install -D -m 644 systemd/autotune.tmpfiles $(DESTDIR)/usr/lib/tmpfiles.d/kv-autotune.conf
	@install -D -m 644 systemd/autotune.yaml $(DESTDIR)/etc/kv-autotune/autotune.yaml.example
	@[ -e $(DESTDIR)/etc/kv-autotune/autotune.yaml ] || install -m 644 systemd/autotune.yaml $(DESTDIR)/etc/kv-autotune/autotune.yaml
	@if [ "$(SYSTEMD_VERSION)" -ge 253 ] 2>/dev/null; then \
	  install -D -m 644 systemd/autotune-notify-reload.conf $(UNITDIR)/autotune.service.d/notify-reload.conf; fi
	@if [ -n "$(GPU)" ]; then install -D -m 644 systemd/autotune-engine-gpu.conf $(UNITDIR)/autotune-engine.service.d/gpu.conf; fi
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then \
	  systemd-sysusers kv-autotune.conf && systemd-tmpfiles --create kv-autotune.conf && systemctl daemon-reload; fi
	@echo "Installed. Put a model into /var/lib/kv-autotune/model, look at /etc/kv-autotune/autotune.yaml, then:"
	@echo "  systemctl enable --now autotune-engine autotune"

uninstall: ## take the units away again; configuration, state and user stay
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl disable --now $(UNITS) || true; fi
	@rm -f $(UNITS:%=$(UNITDIR)/%) $(UNITDIR)/autotune.service.d/notify-reload.conf $(UNITDIR)/autotune-engine.service.d/gpu.conf \
	  $(DESTDIR)/usr/lib/systemd/system-preset/50-kv-autotune.preset $(DESTDIR)/usr/lib/sysusers.d/kv-autotune.conf \
	  $(DESTDIR)/usr/lib/tmpfiles.d/kv-autotune.conf $(DESTDIR)/etc/kv-autotune/autotune.yaml.example
	@rmdir $(UNITDIR)/autotune.service.d $(UNITDIR)/autotune-engine.service.d 2>/dev/null || true
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
	@echo "Left alone: $(DESTDIR)/etc/kv-autotune, $(DESTDIR)/var/lib/kv-autotune, the user kv-autotune"

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

$(VENV)/.fuzz: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[engine,train,dev,fuzz]'
	@touch $@

$(VENV)/.browser: pyproject.toml constraints.txt | $(VENV)/.dev
	$(PIP) install -c constraints.txt -e '.[engine,train,dev,browser]'
	@touch $@

clean: ## remove the virtual environment, what was built, compiled kernels and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis run *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
