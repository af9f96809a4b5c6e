# Headfold's commands. Each says what it does; `make help` lists them. Needs only make and Python 3.11 or newer.

PYTHON ?= python3
# What pip is given for torch, before everything else: on a machine without a GPU the CPU build is smaller.
TORCH ?= torch==2.13.0
DEMO ?= runs/demo

VENV := $(CURDIR)/.venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UI_PORT ?= 5000

# Nothing in the commands below may reach for a model hub, or guess at a proxy for the loopback address.
export HF_HUB_OFFLINE ?= 1
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION ?= false

.DEFAULT_GOAL := help
.PHONY: help setup demo ui test test-fast lint clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP) ## make .venv and install Headfold with everything that the demo and the tests need

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  f"Headfold needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; name another: make setup PYTHON=python3.12")'
	@echo "setup: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing $(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "setup: installing Headfold and what it needs (about 2 GB unpacked)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[eval,dev]'
	@touch $(STAMP)
	@echo "setup: done; the command is $(BIN)/headfold"

demo: $(STAMP) ## search, promote and export on the demo checkpoint, then load the export with plain transformers
	@echo "demo: searching configs/demo.yaml, results in $(DEMO)"
	@mkdir -p $(DEMO)
	@$(BIN)/headfold search configs/demo.yaml storage=$(DEMO) --json $(DEMO)/outcome.json
	@echo "demo: loading the export with plain transformers, in a process that cannot import Headfold"
	@exported=$$($(BIN)/python -c 'import json, sys; print(json.load(open(sys.argv[1]))["promotion"]["exported"])' $(DEMO)/outcome.json) && \
	  packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  (cd / && PYTHONPATH=$$packages $(BIN)/python -S -P $(CURDIR)/examples/load_exported.py $$exported) && \
	  echo "demo: exported checkpoint  $$exported"
	@echo "demo: trials in MLflow     make ui"

ui: $(STAMP) ## show the demo's runs in MLflow on the loopback address
	@test -f $(DEMO)/mlflow.db || { echo "ui: $(DEMO)/mlflow.db does not exist; run 'make demo' first"; exit 1; }
	@echo "ui: http://127.0.0.1:$(UI_PORT)  (Ctrl-C ends it)"
	@$(BIN)/mlflow server --host 127.0.0.1 --port $(UI_PORT) --workers 1 --backend-store-uri sqlite:///$(DEMO)/mlflow.db

test: lint ## lint, types, import rule, and every test
	@echo "test: all tests"
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --durations 10

test-fast: $(STAMP) ## the tests that take seconds
	@echo "test-fast: tests without those marked slow"
	@$(BIN)/python -m pytest -m "not slow"

lint: $(STAMP) ## style, types and the import rule between the packages
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "lint: run '.venv/bin/ruff format .'"; exit 1; }
	@echo "lint: pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@echo "lint: import rule"
	@$(BIN)/lint-imports

clean: ## remove .venv, caches and the demo's runs
	@echo "clean: removing .venv, caches, $(DEMO)"
	@rm -rf $(VENV) $(DEMO) .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
