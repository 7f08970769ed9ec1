# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
FRAMEWORKS_DIR ?= .frameworks
READY := $(VENV)/.ready

# What runs torch without a framework, and transformers where it takes that torch.
TORCH_TESTS := tests/unit/moetrace $(addprefix tests/integration/test_, numerics.py compiled_collectives.py \
	rank_counts.py rank_waits.py wrapped_models.py placement_ranks.py)

.PHONY: setup demo test test-frameworks test-torch faults check generate clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: setup
	$(BIN)/moetrace demo $(DEMO_OPTIONS)

test: setup
	$(BIN)/python -m pytest $(TEST_OPTIONS)

# Real MoE frameworks in environments of their own; FRAMEWORKS='torchtitan olmo_core' for others than the default.
test-frameworks: setup
	FRAMEWORKS_DIR=$(FRAMEWORKS_DIR) $(BIN)/python tests/frameworks/setup.py $(FRAMEWORKS)
	FRAMEWORKS_DIR=$(FRAMEWORKS_DIR) $(BIN)/python -m pytest tests/frameworks -m framework $(TEST_OPTIONS)

# The library under another torch, in an environment of its own: `make test-torch VERSION=2.8.0`.
test-torch: setup
	$(if $(VERSION),,$(error VERSION=... is needed: a release of torch, as in `make test-torch VERSION=2.8.0`))
	FRAMEWORKS_DIR=$(FRAMEWORKS_DIR) $(BIN)/python tests/frameworks/setup.py torch==$(VERSION)
	$(FRAMEWORKS_DIR)/torch-$(VERSION)/bin/python -m pytest $(TORCH_TESTS) $(TEST_OPTIONS)

# Faults in the numbers of a release: 20 kills under load, 10,000 connections opened and dropped.
faults: setup
	MOETRACE_FAULT_KILLS=20 MOETRACE_FAULT_CONNECTIONS=10000 $(BIN)/python -m pytest \
		tests/integration/test_collector_faults.py tests/unit/collectors/test_wal.py \
		tests/unit/collectors/test_durable_intake.py $(TEST_OPTIONS)

# What CI checks before the tests: style, types, import directions, generated files.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python schemas/generate.py --check
	$(BIN)/python schemas/generate_tables.py --check
	$(BIN)/python -m moetrace_dashboards.build --check

generate: setup
	$(BIN)/python schemas/generate.py
	$(BIN)/python schemas/generate_tables.py
	$(BIN)/python -m moetrace_dashboards.build

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
