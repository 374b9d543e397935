# moonbus: the verbs. `make demo` on a fresh machine needs Python 3.11+, make and a package index; nothing else.
#
#   PYTHON=python3.12   which interpreter builds the environment
#   VENV=.venv          where the environment lies
#   ARGS="--port 9000"  passed on to demo, up, test and migrate
#   TEST_PROCESSES=2    how many processes the tests run in, each with servers of its own
#
# pip takes the build of torch that its index offers. For the much smaller CPU build, point PIP_EXTRA_INDEX_URL (or
# PIP_FIND_LINKS) at one that carries it; constraints.txt accepts either build of the pinned release.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
TEST_PROCESSES ?= 2

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo up test test-unit test-soak test-rdma check migrate docs clean

help:  ## Show the verbs
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## Create the environment and install everything into it

demo: $(STAMP)  ## Start a whole stack, show a prefix computed on one node being reused on another, stop
	@$(BIN)/moonbus demo $(ARGS)

up: $(STAMP)  ## Keep a stack running in the foreground (Ctrl-C drains and stops)
	@$(BIN)/moonbus up $(ARGS)

test: $(STAMP)  ## Run all tests
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile $(ARGS)

test-unit: $(STAMP)  ## Run the tests that do no I/O
	@$(BIN)/python -m pytest tests/unit $(ARGS)

test-soak: $(STAMP)  ## Take Postgres away for two minutes, NATS and a store-manager too, and compare catalog and workers
	@$(BIN)/python -m tests.support.outages --seconds 120

test-rdma: $(STAMP)  ## Run the RDMA tests: they boot a machine with a Soft-RoCE device in QEMU
	@$(BIN)/python -m pytest tests/rdma $(ARGS)

check: $(STAMP)  ## Lint, check types, check the import arrows
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

migrate: $(STAMP)  ## Bring the catalog's schema up to date (MOONBUS_POSTGRES_URL names the database)
	@$(BIN)/moonbus migrate $(ARGS)

docs: $(STAMP)  ## Generate docs/configuration.md and docs/messages.md from the code
	@$(BIN)/moonbus docs $(ARGS)

clean:  ## Remove the environment, caches and build outputs (what a stack stored in .moonbus stays)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so that an interrupted install is done again. The tree is installed editable: it stays live, but
# for what is compiled.
$(STAMP): pyproject.toml constraints.txt setup.py shared/transfer/_native.c services/conductor/core/_native.c
	@command -v $(PYTHON) >/dev/null || { \
	  echo "moonbus: $(PYTHON) is not on PATH; install Python 3.11 or newer, or run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "moonbus: $(PYTHON) is $$($(PYTHON) -V 2>&1); moonbus needs 3.11 or newer, run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "moonbus: $(PYTHON) cannot create environments; on Debian and Ubuntu run: sudo apt install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	@echo "moonbus: installing into $(VENV); the first time takes some minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[engine,local,load,dev]'
	@touch $@
