# Every target sets itself up in .venv, from nothing but python3 (3.11 or later) and a package index.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?=
N      ?= 1000
SEEDS  ?= 10000
LOG    ?= docs/results/crash.jsonl
export PYTHONSAFEPATH := 1

.PHONY: install demo test stress crash crash-states lint bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# The whole job on a fresh machine: a real model, real documents, three tiers, two modes.
demo: install
	$(BIN)/kvtier demo $(if $(MODEL),--model $(MODEL))

test: install
	$(BIN)/python -m pytest -q

# SEEDS: how many programs of copies are judged on the simulated device.
stress: install
	SEEDS=$(SEEDS) $(BIN)/python -m pytest -q -m stress

# Kill a store's process N times, at random instants and at chosen calls; counts add up in LOG.
crash: install
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.nvme.crash --rounds $(N) --log $(LOG)

# Every disk that a power cut may leave of every workload of up to three operations.
crash-states: install
	$(BIN)/python -m pytest -q -m "stress or not stress" tests/nvme/test_crash_states.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	for bench in index tiers attention requests; do PYTHONPATH=$(CURDIR) $(BIN)/python -m bench.$$bench || exit 1; done

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
