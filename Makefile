# Everything needs nothing but Python 3.11 or newer: the environment is made in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test check format bench bench-profile bench-scale bench-masking clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@# torch first: its wheel may be a local CPU build that pip must not be tempted to replace.
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## Four methods on scikit-learn's digits with label skew and dropout: a table, plots and an HTML report.
	rm -rf demo
	$(BIN)/fedstrata partition examples/specs/demo.toml --out demo/partition.png
	$(BIN)/fedstrata compare examples/specs/demo.toml --out demo
	@echo "open demo/report.html"

test: $(STAMP) check  ## All checks and all tests.
	$(BIN)/python -m pytest

check: $(STAMP)  ## Format, lint, types, import rules.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## fedstrata beside its peers, each in an environment of its own: docs/benchmarks.md. An hour.
	$(BIN)/python benchmarks/peers/bench.py --out docs/benchmarks.md

bench-profile: $(STAMP)  ## Where a round's time goes, and how far from the centralised limit.
	$(BIN)/python benchmarks/peers/limit.py

bench-scale: $(STAMP)  ## Memory and time of a round against the number of clients.
	$(BIN)/python benchmarks/scale.py

bench-masking: $(STAMP)  ## Time and bytes of masking labels: docs/masking.md.
	$(BIN)/python benchmarks/masking.py

clean:
	rm -rf $(VENV) demo build dist
