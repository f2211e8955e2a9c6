PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start many processes: without bytecode each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-all check format docs bench audit clean

train: $(VENV)/.ready
	$(BIN)/gredp train

test: $(VENV)/.dev check
	$(BIN)/python -m pytest -q

test-all: $(VENV)/.dev check
	$(BIN)/python -m pytest -q -m "slow or not slow"

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site in site/, without warnings; open site/index.html.
docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

# A record and the page made from it; BENCH=--quick takes under three minutes and leaves both alone.
bench: $(VENV)/.dev
ifeq ($(BENCH),--quick)
	$(BIN)/python benchmarks/step_time.py --quick --out runs/step_time.json
else
	$(BIN)/python benchmarks/step_time.py --out results/step_time.json
	$(BIN)/python benchmarks/step_time.py --quick --threads 1 --out results/step_time_one_thread.json
	$(BIN)/python benchmarks/scaling.py --out results/scaling.json
	$(BIN)/python benchmarks/pages.py performance readme
endif

# The auditor's records and the page made from them, about ten minutes.
audit: $(VENV)/.dev
	$(BIN)/gredp audit --all --out results/audit.json
	$(BIN)/python tests/planted/record.py --out results/audit_self_test.json
	$(BIN)/python benchmarks/audit_null.py --out results/audit_null.json
	$(BIN)/python benchmarks/pages.py audit

# torch first and by its exact version: any looser request can pull gigabytes of GPU libraries.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[cli]'
	touch $@

# What tests, checks, docs and benchmarks need beyond it, other trainers and trackers among them.
$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
