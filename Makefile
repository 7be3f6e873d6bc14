# make train | test | test-full | lint | bench | clean
# Each target makes its own environment in .venv on first use; a second run starts at once.

PYTHON ?= python3
# Installed by itself and first. A plain `torch` on Linux may bring a CUDA build of several GB: where your
# index serves that, ask for the CPU build, for example
#   make train TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# How much of the matrices `make test-full` tries (1 is all of it), and on how many cores.
CASES ?= 1
JOBS ?= auto
# Further options of the training run: make train ARGS="--layers 12 --steps 500"
ARGS ?=

# Packages whose types are checked strictly; all others are checked as mypy does by default.
STRICT := hal relay/runtime relay/eps relay/optim relay/data

VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.ready-to-run
DEV_READY := $(VENV)/.ready-to-develop
TORCH_IN_RANGE = $(BIN)/python -c "import torch; v = tuple(map(int, torch.__version__.split('.')[:2])); raise SystemExit(not (2, 11) <= v < (2, 15))"

.PHONY: train test test-full lint bench clean

train: $(RUN_READY)
	$(BIN)/relay train $(ARGS)

test: $(DEV_READY)
	$(BIN)/python -m pytest

# All combinations of the two parity matrices instead of every pair: 93,312 and 18,432 cases, 0.6 and 1.8 seconds of
# one core each: 25 hours on one core, 13 on two. `make test-full CASES=300` tries 300 of each, drawn at
# random by a fixed seed: a quarter of an hour on one core. Before them, all tests of the scheduler on the simulator in
# the latest order and ten drawn ones. Then all tests marked `exhaustive`: the combinations, rows and repetitions of which
# `make test` runs a sample. Then PyTorch's own samples of operators and modules (3,000 as layers, and every ATen op that
# they reach, for its strides): half an hour on one core; and five times as many damaged checkpoints.
test-full: $(DEV_READY)
	for order in late random:0 random:1 random:2 random:3 random:4 random:5 random:6 random:7 random:8 random:9; do \
		$(BIN)/python -m pytest -n $(JOBS) -m "" --adversary $$order || exit 1; \
	done
	$(BIN)/python -m pytest -n $(JOBS) -m exhaustive
	RELAY_FULL_SWEEP=1 $(BIN)/python -m pytest -n $(JOBS) -m "" tests/relay/capture/sweep tests/relay/checkpoint
	RELAY_FULL_MATRIX=$(CASES) $(BIN)/python -m pytest -n $(JOBS) -m "" tests/relay/test_parity_matrix.py tests/relay/test_family_matrix.py

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --follow-imports=silent $(STRICT)

bench: $(RUN_READY)
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf $(VENV) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are written last, so an interrupted set-up is simply taken up again.
$(RUN_READY): pyproject.toml
	@echo "Setting up $(VENV) (once; a few minutes at most) ..."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(TORCH_IN_RANGE) 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(DEV_READY): $(RUN_READY)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@
