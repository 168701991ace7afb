# Every command of the project. `make` alone lists them.
#
#   PYTHON   interpreter for the environment (default python3, 3.11 or newer)
#   ENGINE   cpu or cuda (default: cuda where a CUDA device answers)
#   PYTEST   more arguments for pytest: make test PYTEST="-k nvme -x"
#   VERSION  vLLM version for test-vllm
#   BENCH    arguments for the benchmark: make bench BENCH="--quick --only transfers"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
PYTEST ?=
BENCH ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := $(filter-out %/seed.txt %/torch-2.11.txt,$(wildcard tools/requirements/*.txt))

# Three processes: one runs the engine tests, the others everything else, file by file. Many tests
# wait for processes or disks, so three keep two cores busy. PYTEST="-n 0" runs all in one, as a
# debugger needs it.
IN_THREE := -n 3 --dist loadgroup --no-loadscope-reorder
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict \
	--config-file tools/dev/site/mkdocs.yml
QUICK := not engine and not lengthy and not slow and not soak

# Each test starts hundreds of processes: they find bytecode, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo bench bench-gpu sanitize-gpu test test-quick test-vllm lint format soak
.PHONY: docs figures wheel clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything at pinned versions

$(STAMP): $(PINS) tools/setup.sh setup.cfg
	@PYTHON="$(PYTHON)" bash tools/setup.sh $(VENV)
	@touch $@

demo: $(STAMP) ## run the main job end to end and print what came from where
	@$(BIN)/python -m kvcascade.tools demo

bench: $(STAMP) ## measure beside vLLM's own offloading (BENCH="--quick" for two minutes)
	@$(BIN)/python -m kvcascade.tools bench $(BENCH)

bench-gpu: $(STAMP) ## measure all tiers on an NVIDIA GPU, and say what was left out
	@$(BIN)/python -m kvcascade.tools bench --only gpu $(BENCH)

sanitize-gpu: $(STAMP) ## run the small GPU tests under compute-sanitizer; needs an NVIDIA GPU
	@$(BIN)/python -m pytest -q -rs -m slow tests/gpu/test_sanitizer.py $(PYTEST)

test: $(STAMP) ## run the tests but those that take long, real-engine tests included
	@$(BIN)/python -m pytest -q $(IN_THREE) $(PYTEST)

test-quick: $(STAMP) ## run the tests that need seconds: no engine, few processes, fewer examples
	@HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -q $(IN_THREE) -m "$(QUICK)" $(PYTEST)

test-vllm: ## run the tests for another vLLM (VERSION=0.19.1; the README lists them)
	@PYTHON="$(PYTHON)" bash tools/test_vllm.sh "$(VERSION)" $(PYTEST)

soak: $(STAMP) ## run the tests that take long
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -q -m "slow or soak" $(PYTEST)

lint: $(STAMP) ## ruff, mypy (package, then tests), pyright, and the site built strictly
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy tests
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(SITE)

docs: $(STAMP) ## build the documentation site into out/site
	@$(SITE)
	@echo "open out/site/index.html"

figures: $(STAMP) ## draw the pictures of the documentation from the data in it
	@$(BIN)/python -m kvcascade.tools.dev.site.figures

format: $(STAMP) ## let ruff lay out the code
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

wheel: $(STAMP) ## build sdist and wheel into dist/
	@rm -rf build dist
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_sdist("dist")' >/dev/null
	@$(BIN)/python -c 'from setuptools import build_meta as b; b.build_wheel("dist")' >/dev/null
	@ls dist

clean: ## remove everything that was made here, .venv and .vllm too
	@rm -rf $(VENV) .vllm build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
