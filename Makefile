# Two commands: `make run` (the demo study on this machine) and `make test`. Each sets up .venv first, when it is not current.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUDY ?= demo
# 126 where a card is older than the CUDA 13 builds of torch know (a V100); on a login node without one: make venv CUDA=126,
# which stays, since newer cards, too, run it
ifndef CUDA
CUDA := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | awk '$$1 > 0 && $$1 < 7.5 { print 126; exit }')
CUDA := $(or $(CUDA),$(patsubst $(VENV)/.current%,%,$(wildcard $(VENV)/.current126)))
endif
STAMP := $(VENV)/.current$(CUDA)
DEV_STAMP := $(VENV)/.current-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SHORT := grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully|ERROR|error)' | cut -c1-110; exit $${PIPESTATUS[0]}
TORCH := $(shell grep ^torch== requirements.txt)
ifeq ($(CUDA),126)
TORCH := $(TORCH)+cu126 --index-url https://download.pytorch.org/whl/cu126
endif
# torch goes first and without its hash: which build it is, CPU or CUDA, is the choice of the index that pip is set to
LOCKED := $(PIP) --no-deps --require-hashes --progress-bar on
# without bytecode each of some hundred processes of the tests compiles torch and sympy anew: 9 s of CPU for 3.5
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check coverage lab venv venv-dev lint lock help clean
.DEFAULT_GOAL := help

help:
	@echo "make run    set up, run the demo study on this machine, print the path of its report"
	@echo "make test   set up, pass every test"
	@echo "make check  lint, types and the quick tests (a minute)"
	@echo "make coverage  which lines no test runs"
	@echo "make lab    JupyterLab on the study's own copies of the notebooks (STUDY=demo)"
	@echo "make venv   the set-up alone (make venv-dev: with what tests and lint need; CUDA=126: for V100s)"
	@echo "make lock   write requirements*.lock after a change of versions"

venv: $(STAMP)
	@:

venv-dev: $(DEV_STAMP)
	@:

$(STAMP): requirements.lock requirements-cuda$(CUDA).lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (Python 3.11)" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "missing: Python 3.11 ($(PYTHON) is $$($(PYTHON) -V 2>&1)); try make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "missing: the venv module of $(PYTHON) (Debian: apt install python3-venv)" >&2; exit 2; }
	@command -v git >/dev/null || echo "note: git is missing; reports will not name a revision" >&2
	@echo "set-up: $(VENV) (2 GB with a CPU build of torch, 6 GB with a CUDA build; a few minutes at the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.current*
	@$(PIP) --no-deps --progress-bar on $(TORCH) 2>&1 | $(SHORT)
	@$(LOCKED) -r requirements.lock 2>&1 | $(SHORT)
	@! $(BIN)/python -c 'from importlib.metadata import requires as r; exit("nvidia" not in str(r("torch")))' \
	  || { $(LOCKED) -r requirements-cuda$(CUDA).lock 2>&1 | $(SHORT); }
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "set-up: done"

$(DEV_STAMP): $(STAMP) requirements-dev.lock
	@$(LOCKED) -r requirements-dev.lock 2>&1 | $(SHORT)
	@touch $@

lock: venv-dev
	@.ci/lock

run: venv
	@$(BIN)/python -m trilane run all --study $(STUDY) --fresh

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder

test: venv-dev lint
	$(PYTEST)

# apart from `make test`, as it costs a quarter of the time
coverage: venv-dev
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; export COVERAGE_FILE=$$folder/data; \
	  $(subst -m pytest,-m coverage run -m pytest,$(PYTEST)); code=$$?; \
	  $(BIN)/coverage combine --quiet; $(BIN)/coverage report --sort=cover --fail-under=90 >$$folder/report || code=$$((code + 2)); \
	  sed -n '1,12p;/^TOTAL/p;/^Coverage/p' $$folder/report; exit $$code

check: venv-dev lint
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup --no-loadscope-reorder

lint: venv-dev
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

lab: venv
	@$(BIN)/python -m trilane run all --lab --study $(STUDY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
