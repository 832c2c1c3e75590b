# Two commands: `make run` (the demo study on this machine) and `make test`. Each sets up .venv first, when it is not current.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUDY ?= demo
STAMP := $(VENV)/.current

.PHONY: run test check lab venv help clean
.DEFAULT_GOAL := help

help:
	@echo "make run    set up, run the demo study on this machine, print the path of its report"
	@echo "make test   set up, pass every test"
	@echo "make check  lint, types and the quick tests (under 3 minutes)"
	@echo "make lab    JupyterLab on the notebooks"
	@echo "make venv   the set-up alone"

venv: $(STAMP)
	@:

$(STAMP): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.11 or 3.12)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
	  || { echo "missing: Python 3.11 or 3.12 ($(PYTHON) is $$($(PYTHON) -V 2>&1)); try make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "missing: the venv module of $(PYTHON) (Debian: apt install python3-venv)" >&2; exit 2; }
	@command -v git >/dev/null || echo "note: git is missing; reports will not name a revision" >&2
	@echo "set-up: $(VENV) (about 2 GB; a few minutes at the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -r requirements.txt 2>&1 \
	  | grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully|ERROR|error)' \
	  | cut -c1-110; exit $${PIPESTATUS[0]}
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --editable .
	@touch $@
	@echo "set-up: done"

run: venv
	@$(BIN)/python -m trilane run all --study $(STUDY) --fresh

test: venv
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(BIN)/python -m pytest

check: venv
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

lab: venv
	$(BIN)/jupyter lab --notebook-dir=notebooks

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
