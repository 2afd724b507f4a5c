# On a machine with nothing but Python 3.11 or newer, git and make:
#   make demo    installs into .venv and runs `longmem train $(ARGS)`; MODEL=infinite_former for the other family
#   make test    installs into .venv and runs the linters and all tests

PYTHON ?= python3
VENV ?= .venv
MODEL ?= reformer_lsh
ARGS ?=
PYTEST_ARGS ?=

bin := $(VENV)/bin
install := $(bin)/python -m pip install --quiet --constraint constraints-cpu.txt

.PHONY: demo test clean

demo: $(VENV)/.package
	$(bin)/longmem train --model_type $(MODEL) $(ARGS)

test: $(VENV)/.tests
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	OMP_NUM_THREADS=1 $(bin)/python -m pytest -n logical --dist loadfile $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.torch: constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(install) torch
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(install) --editable .
	@touch $@

$(VENV)/.tests: $(VENV)/.package
	$(install) --editable '.[test]'
	@touch $@
