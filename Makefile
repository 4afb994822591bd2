# Everything needs nothing but Python 3.11 or newer: the environment is made in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
TORCH  := $(VENV)/.torch
LEAN   := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev

.PHONY: accessibility demo docs screens package test test-fast test-long check format-check lint types imports prose words format reference bench bench-profile bench-scale bench-masking bench-paths bench-before clean

# One process more than there are processors, because one mostly waits for servers and sites. Tests start many processes,
# which would otherwise compile every module anew where the environment forbids to write bytecode. A process that is lost
# ends the tests: pytest-xdist 3.8 waits for ever after it has started another one.
CORES  := $(shell getconf _NPROCESSORS_ONLN)
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

# torch first: its wheel may be a local CPU build that pip must not be tempted to replace.
$(TORCH): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	touch $@

# What a run needs; test tools, Ray, NVFlare and TenSEAL come when somebody works on the code.
$(LEAN): $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEV): $(TORCH)
	@# uv installs 200 packages in seconds, and pip, where uv cannot reach them, in minutes.
	{ $(BIN)/pip install --quiet uv && \
	  $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'; } || \
	  $(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(LEAN)  ## Four methods on scikit-learn's digits with label skew and dropout: a table, plots and an HTML report.
	rm -rf demo
	$(BIN)/fedstrata compare examples/specs/demo.toml --out demo
	@echo "open demo/report.html"

docs: $(DEV)  ## The site, with its gallery executed, every warning an error: build/site/index.html.
	rm -rf build/site build/doctrees docs/gallery docs/concepts
	$(BIN)/python -m sphinx -q -b html -d build/doctrees -W --keep-going docs build/site
	@echo "open build/site/index.html"

screens: $(DEV)  ## The outputs and pictures of the first comparison, on its page and the front page. Needs Chromium.
	$(BIN)/python docs/screens.py

package:  ## Wheel and sdist, checked; then the demo from the wheel in an empty environment. Before a release.
	rm -rf build/package dist
	$(PYTHON) -m venv build/package/tools
	build/package/tools/bin/pip install --quiet build twine
	build/package/tools/bin/python -m build --outdir dist .
	build/package/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/package/empty
	build/package/empty/bin/pip install --quiet --constraint constraints.txt torch
	build/package/empty/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	mkdir build/package/folder
	cd build/package/folder && ../empty/bin/fedstrata new demo && ../empty/bin/fedstrata compare demo.toml --out demo --quiet

test: $(DEV)  ## All checks, and all tests but those that take minutes each.
	$(MAKE) --jobs $(CORES) check
	$(PYTEST) -n $$(($(CORES) + 1))

test-fast: $(DEV)  ## Tests that start no processes and take a tenth of a second at most: for the time between two changes.
	$(PYTEST) -n $(CORES) -m 'not slow and not long'

test-long: $(DEV)  ## Tests that take long: kills, faults, every method on every engine.
	$(PYTEST) -n $(CORES) -m long

check: format-check lint types imports prose words  ## Format, lint, types, import rules, counts of what is hard to read, and of words.

format-check: $(DEV)
	$(BIN)/ruff format --check .

lint: $(DEV)
	$(BIN)/ruff check .

types: $(DEV)
	$(BIN)/mypy

imports: $(DEV)
	$(BIN)/lint-imports

prose: $(DEV)
	$(BIN)/python tools/prose.py

words: $(DEV)
	$(BIN)/python tools/words.py

accessibility: $(DEV) demo docs  ## Report, status page and site against WCAG 2.2 AA, in both themes: needs npm and Chromium.
	npm install --silent --no-save --prefix build/axe axe-core@4
	$(BIN)/python tools/accessibility.py build/axe/node_modules/axe-core/axe.min.js demo/report.html \
	  $(patsubst %,build/site/%.html,index start/first-comparison reference/spec/training reference/api-results results/claims)

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(DEV)  ## What is generated from the settings: the command line's table, and the pages in docs/reference/spec.
	$(BIN)/python -m fedstrata.cli.known
	$(BIN)/fedstrata settings --markdown docs/reference/spec

bench: $(DEV)  ## fedstrata beside its peers, each in an environment of its own: docs/results/speed.md. An hour.
	$(BIN)/python benchmarks/peers/bench.py --out docs/results/speed.md

bench-profile: $(DEV)  ## Where a round's time goes, and how far from the centralised limit.
	$(BIN)/python benchmarks/peers/limit.py

bench-scale: $(DEV)  ## Memory and time of a round against the number of clients.
	$(BIN)/python benchmarks/scale.py --page docs/results/measurements.md

bench-paths: $(DEV)  ## What each path that exists for speed wins over the plain one. A quiet machine, ten minutes.
	$(BIN)/python benchmarks/fast_paths.py --results benchmarks/results

bench-before: $(DEV)  ## This tree against an earlier one, in turns: make bench-before COMMIT=HEAD~1. A quiet machine.
	$(BIN)/python benchmarks/before.py $(or $(COMMIT),HEAD)

bench-masking: $(DEV)  ## Time and bytes of masking labels: benchmarks/results/masking.md, docs/privacy/masked-labels.md.
	$(BIN)/python benchmarks/masking.py

clean:
	rm -rf $(VENV) demo build dist
