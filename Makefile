# Two commands: `make run` (the demo study on this machine) and `make test`. Each sets up .venv first, when it is not current.
SHELL := /bin/bash
# which Python, where none is named: .ci/venv
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
STUDY ?= demo
# Which build of torch. cpu: the one without CUDA. 126: CUDA 12.6, where a card is older than the CUDA 13 builds know (a V100); on a
# login node without one: make venv CUDA=126. Either stays until `make clean`: newer cards, too, run 126
ifndef CUDA
CUDA := $(patsubst $(VENV)/.current%,%,$(wildcard $(VENV)/.current126 $(VENV)/.currentcpu))
CUDA := $(or $(CUDA),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | awk '$$1 > 0 && $$1 < 7.5 { print 126; exit }'))
endif
STAMP := $(VENV)/.current$(CUDA)
CUDA_LOCK := requirements-cuda$(filter 126,$(CUDA)).lock
DEV_STAMP := $(VENV)/.current-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SHORT := grep --line-buffered -E '^(Collecting|Downloading|Installing|Successfully|ERROR|error)' | cut -c1-110; exit $${PIPESTATUS[0]}
TORCH := $(shell grep ^torch== requirements.txt)
ifneq ($(CUDA),)
BUILD := $(CUDA:126=cu126)
TORCH := $(TORCH)+$(BUILD) --index-url https://download.pytorch.org/whl/$(BUILD)
endif
# torch goes first and without its hash: which build it is, CPU or CUDA, is the choice of the index that pip is set to
LOCKED := $(PIP) --no-deps --require-hashes --progress-bar on
# without bytecode each of some hundred processes of the tests compiles torch and sympy anew: 9 s of CPU for 3.5
unexport PYTHONDONTWRITEBYTECODE
ENVIRONMENT := '$(VENV)' '$(subst ','\'',$(PYTHON))'
ANEW := $(shell .ci/venv --check $(ENVIRONMENT) || echo anew)

.PHONY: anew run test check coverage lab venv venv-dev lint lock help clean
.DEFAULT_GOAL := help

help:
	@echo "make run    set up, run the demo study on this machine, print the path of its report"
	@echo "make test   set up, pass every test"
	@echo "make check  lint, types and the quick tests (a minute)"
	@echo "make coverage  which lines no test runs"
	@echo "make lab    JupyterLab on the study's own copies of the notebooks (STUDY=demo)"
	@echo "make venv   the set-up alone (make venv-dev: with what tests and lint need)"
	@echo "   PYTHON=python3.12  with this Python, 3.11 to 3.13; otherwise python3, else the newest that is there"
	@echo "   CUDA=cpu           with the build of torch without CUDA (CUDA=126: with CUDA 12.6, for V100s)"
	@echo "make lock   write requirements*.lock after a change of versions"

venv: $(STAMP)
	@:

venv-dev: $(DEV_STAMP)
	@:

$(STAMP): requirements.lock $(CUDA_LOCK) pyproject.toml $(ANEW)
	@case '$(CUDA)' in '' | cpu | 126) ;; *) echo "CUDA=$(CUDA): cpu, 126, or nothing (make CUDA= where it is of another program)" >&2; exit 2 ;; esac
	@.ci/venv $(ENVIRONMENT)
	@command -v git >/dev/null || echo "note: git is missing; reports will not name a revision" >&2
	@echo "set-up: 2 to 3 GB with a CPU build of torch, 6 GB with a CUDA build; some minutes at the first time"
	@rm -f $(VENV)/.current*
	@$(PIP) --no-deps --progress-bar on $(TORCH) 2>&1 | $(SHORT)
	@$(LOCKED) -r requirements.lock 2>&1 | $(SHORT)
	@! $(BIN)/python -c 'from importlib.metadata import requires as r; exit("nvidia" not in str(r("torch")))' \
	  || { $(LOCKED) -r $(CUDA_LOCK) 2>&1 | $(SHORT); }
	@$(PIP) --quiet --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "set-up: done"

$(DEV_STAMP): $(STAMP) requirements-dev.lock
	@$(LOCKED) -r requirements-dev.lock 2>&1 | $(SHORT)
	@touch $@

lock: venv-dev
	@.ci/lock

run: venv
	@$(BIN)/python -m trilane run all --study $(STUDY) --resume

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
