# Every target makes its own environment in .venv when there is none: `make demo` works in a fresh clone.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTS := $(VENV)/.installed-for-tests
# The first interpreter that this project supports; PYTHON=/path/to/python3.12 overrides it.
PYTHON ?= $(firstword $(foreach name,python3 python3.12 python3.13 python3.11,$(shell \
	$(name) -c 'import sys; print("$(name)" * ((3, 11) <= sys.version_info[:2] <= (3, 13)))' 2>/dev/null)))
# In three processes, which wait more than they compute, in the order given: the files of tests/distributed take longest. Those of
# tests/cluster run by themselves, since their Rays starve beside the ranks of other tests.
PARALLEL := $(BIN)/python -m pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder
CONFIG := configs/llama-tiny_cpu_sp2-dp2_8k.yaml
CORPUS := runs/corpus-stdlib
ELASTIC := configs/llama-tiny_cpu_sp2-elastic_2k.yaml

# Hundreds of processes read the package: one compiles it.
test test-unit test-all test-faults mutants: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo rehearse soak gpu test test-unit test-all test-faults mutants check format docs site

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## Make the environment in .venv, without the tools of tests

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found: install one, or set PYTHON" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	@touch $@

$(TESTS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -c constraints.txt
	@touch $@

demo: $(STAMP)  ## Prepare, plan and train a small model on this machine's CPU, in a few minutes
	$(BIN)/ray-ulysses prepare "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
		--pattern '*.py' --exclude site-packages --tokenizer bytes --out $(CORPUS)
	$(BIN)/ray-ulysses plan $(CONFIG)
	$(BIN)/ray-ulysses train $(CONFIG)

# What a rehearsal trains on: a part of the standard library.
runs/corpus-rehearsal: | $(STAMP)
	stdlib="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" && \
	$(BIN)/ray-ulysses prepare "$$stdlib/asyncio" "$$stdlib/email" --pattern '*.py' --tokenizer bytes --out $@

rehearse: runs/corpus-rehearsal  ## Train on several local nodes, lose, drain and regain some, and prove that it does not show
	$(BIN)/ray-ulysses rehearse $(ELASTIC)

soak: runs/corpus-rehearsal  ## Train for half an hour with a fault a minute; writes tests/results/soak.md
	$(BIN)/ray-ulysses rehearse $(ELASTIC) --every 60s --for 30m --seed 9 --compare 200 --min-ettr 88 \
		--note "commit $$(git rev-parse --short HEAD)" --out tests/results/soak.md

gpu: $(STAMP)  ## Run an item of the programme for a lent GPU, at most eight minutes: make gpu ITEM=P1a
	$(BIN)/python benchmarks/gpu/programme.py $(ITEM)

test: $(TESTS)  ## Run the tests that every change must pass
	$(BIN)/python -m pytest -m "not slow and not gpu" --durations=5 tests/cluster
	$(PARALLEL) -m "not slow and not gpu" --durations=25 tests/distributed tests/unit

test-unit: $(TESTS)  ## Run the unit tests that take less than a third of a second, in three processes
	$(PARALLEL) -m "not slow and not long and not gpu and not distributed" tests/unit

test-all: $(TESTS)  ## Run every test, the whole parity matrix included
	$(BIN)/python -m pytest

test-faults: $(TESTS)  ## Strike runs with each fault in each phase, and store the table of what they did
	STORE_FAULTS="make test-faults" $(BIN)/python -m pytest tests/distributed/test_faults.py \
		tests/distributed/test_object_store.py \
		tests/unit/run/test_run_dir_in_a_store.py

mutants: $(TESTS)  ## Plant known bugs one by one and check that a test catches each
	$(BIN)/python -m tests.mutants

check: $(TESTS) site  ## Lint, format, types, import contracts, spelling, the image's file and the site of docs/
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/hadolint infra/Dockerfile

format: $(TESTS)  ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(TESTS)  ## Update docs/configuration.md, docs/journal.md and the JSON schema of a configuration
	$(BIN)/python -m tests.configuration_page
	$(BIN)/python -m tests.config_schema
	$(BIN)/python -m tests.journal_page

site: $(TESTS)  ## Build the site of docs/ into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
