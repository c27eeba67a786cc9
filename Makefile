# `make demo` and `make test` need Python 3.10 or newer, and make: each sets up .venv at its first call.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo says-demo test long nightly api docs snapshots lint ruff types lines fuzz chaos frameworks bench results compat screenshots plotly clean

PYTHON ?= python3
PYTEST_ARGS ?=
EXAMPLES ?= 1000
CASES ?=
FRAMEWORKS_ARGS ?=
DEMO ?= --live --nproc-per-node 4 --session demo --sessions traceml-sessions \
	examples/train_gpt.py --steps 250 --slow data:2:40

COMPAT_oldest := torch==2.4.0 'ray[train]==2.51.0'
COMPAT_newest := torch 'ray[train]'
COMPAT_TESTS := tests/unit --deselect tests/unit/test_package.py $(addprefix tests/integration/test_, \
	loops.py span_verdict.py example.py sync_groups.py launch.py multihost.py attached.py driver.py ray_train.py)

# Tests that start processes, including those that judge time (`tests/conftest.py`); and all other tests.
STARTS := tests/browser tests/chaos tests/integration
ALONE := tests/chaos tests/integration
QUIET := tests/unit tests/fuzz
# Uses only CPU time that no other process wants.
IDLE := chrt --idle 0
# A separate name, because `make -n` also runs lines that contain the word MAKE.
TYPES_TOO = $(MAKE) --no-print-directory types

PY := $(CURDIR)/.venv/bin/python
INSTALLED := .venv/.installed
TYPES := build/types
FRAMEWORKS := .venv-frameworks

# Ranks share one machine here: one thread each, or they slow each other down.
export OMP_NUM_THREADS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without compiled files each of a thousand processes compiles this package again, and each pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    train on 4 ranks with one of them slow, and read who it was"
	@echo "make test    every check: lint, types, tests"
	@echo "make nightly  slow checks: tests marked long, and fuzz (an hour and more)"
	@echo "make fuzz    foreign bytes into every decoder, random cases for every property; EXAMPLES=10000 for longer"
	@echo "make snapshots   rewrite the texts that tests compare, after a change of wording"
	@echo "make api     rewrite the reference pages of docs/ from the sources"
	@echo "make docs    the documentation as a site, build/site/index.html; broken links are errors"
	@echo "make lint    ruff and mypy alone        make bench   the benchmarks, in short"
	@echo "make results  every benchmark in full, one after the other (hours), and the page benchmarks/RESULTS.md; ONLY='scale.py soak.py'"
	@echo "make chaos   faults of the monitor, compared with a run without one (half an hour)"
	@echo "make frameworks   Lightning, Hugging Face and others with a slow rank (a venv of its own; 40 minutes)"
	@echo "make compat  the tests on the oldest and on the newest torch and Ray, each in a .venv-… of its own"
	@echo "make screenshots   the pictures of the web app in docs/img (needs chromium and chromedriver)"
	@echo "make plotly  build dash_app/assets/plotly.min.js from its sources (needs Node.js and npm)"
	@echo "make clean   remove what was built (.venv, .venv-frameworks and traceml-sessions stay)"
	@echo "PYTHON=python3.12 chooses the Python that .venv is made with."

# Uses a GPU if there is one; the example prints which. Ranks are named there by the device's clock. The monitor's Ray
# runs at normal priority here, so that the live view starts sooner.
demo: says-demo $(INSTALLED)
	@rm -rf traceml-sessions/demo
	@echo "python -m traceml_ray.launch $(DEMO)"
	@TRACEML_NICE=0 TRACEML_DEVICE_CLOCK=$${TRACEML_DEVICE_CLOCK:-1} $(PY) -m traceml_ray.launch $(DEMO)
	@echo
	@cat traceml-sessions/demo/report.txt
	@echo
	@echo "With charts, to be opened in a browser, mailed or printed:  $(CURDIR)/traceml-sessions/demo/report.html"
	@echo "In the web app, step by step, on http://127.0.0.1:8050:  .venv/bin/traceml-ray dashboard demo"
	@echo "In this terminal:  .venv/bin/traceml-ray top demo"
	@echo "On your own script:  .venv/bin/python -m traceml_ray.launch --live --nproc-per-node 2 train.py"

says-demo:
	@echo "Trains a small GPT on 4 processes of this machine for a minute, one of them slow, and names it with the reason."

# $(call run_tests,PYTHON,WHICH): four at a time, because tests that start processes wait, too; then those that judge
# time, one by one. What both leave idle goes to QUIET where nothing is chosen. Status 5: PYTEST_ARGS has chosen none.
PARALLEL = -m pytest --dist loadfile --no-loadscope-reorder -m "not long and not alone"
CHOSEN = $(filter tests/%,$(PYTEST_ARGS))
define run_tests
three=5; $(if $(2)$(CHOSEN),,$(IDLE) $(1) $(PARALLEL) -n 2 --timeout 1200 $(QUIET) $(PYTEST_ARGS) >build/quiet.log 2>&1 & quiet=$$!;) \
one=0; $(1) $(PARALLEL) -n 4 $(or $(2),$(if $(CHOSEN),,$(STARTS))) $(PYTEST_ARGS) || one=$$?; \
two=0; $(1) -m pytest -m "not long and alone" $(or $(2),$(if $(CHOSEN),,$(ALONE))) $(PYTEST_ARGS) || two=$$?; \
$(if $(2)$(CHOSEN),,three=0; wait $$quiet || three=$$?; cat build/quiet.log;) \
[[ $$one$$two$$three =~ ^[05]+$$ && $$one$$two$$three != 555 ]]
endef

# The result of the type check is printed at the end.
test: ruff
	@mkdir -p build; $(IDLE) $(TYPES_TOO) >build/types.log 2>&1 & types=$$!; \
	tests=0; { $(call run_tests,$(PY)); } || tests=1; \
	typed=0; wait $$types || typed=1; cat build/types.log; [ $$tests$$typed = 00 ]

long: $(INSTALLED)
	$(PY) -m pytest -m long $(PYTEST_ARGS)

nightly: long fuzz

chaos: $(INSTALLED)
	$(PY) -m pytest tests/chaos -m "long or not long" $(PYTEST_ARGS)

# CASES=lightning,hf_trainer/data: beginnings of names; FRAMEWORKS_ARGS="--docs docs/frameworks.md" writes the page.
frameworks: $(FRAMEWORKS)/.installed
	@$(CURDIR)/$(FRAMEWORKS)/bin/python tests/frameworks/run.py --only "$(CASES)" $(FRAMEWORKS_ARGS)

# REV=v0.1.0 compares with that commit.
lines:
	@$(PYTHON) benchmarks/lines.py $(if $(REV),--rev $(REV))

lint: ruff types

ruff: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# The type checker gets the package as a plain install has it: that is where launchers/ and dash_app/
# are mapped to their names. It runs away from the sources, which it would find first.
types: $(INSTALLED)
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/src
	@cp -r pyproject.toml README.md LICENSE traceml_ray launchers dash_app $(TYPES)/src
	@$(PY) -m build --wheel --no-isolation --outdir $(TYPES) $(TYPES)/src >$(TYPES)/build.log 2>&1 \
		|| { cat $(TYPES)/build.log; exit 1; }
	@$(PY) -m zipfile -e $(TYPES)/*.whl $(TYPES)/installed
	cd $(TYPES)/installed && MYPYPATH=. $(PY) -m mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache -p traceml_ray

# Texts that people read, as stored by the tests. Read the diff before you commit it.
snapshots: $(INSTALLED)
	@rm -rf tests/snapshots
	TRACEML_TEST_SNAPSHOTS=1 $(PY) -m pytest -q -p no:xdist -m snapshot tests/unit
	@git --no-pager diff --stat -- tests/snapshots

api: $(INSTALLED)
	$(PY) docs/api_page.py docs/api.md docs/data.md docs/concepts/verdicts.md
	$(PY) docs/reference_pages.py docs/reference

fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest tests/fuzz --timeout=0 $(PYTEST_ARGS)
	FUZZ_EXAMPLES=$(EXAMPLES) $(PY) -m pytest tests/unit -m hypothesis --timeout=0 $(PYTEST_ARGS)

# Hours. The outputs are in build/results/; the tables go into benchmarks/results.json, and the page is made of these.
results: $(INSTALLED)
	@$(PY) benchmarks/results.py build/results $(ONLY)

bench: $(INSTALLED)
	@for run in overhead.py "captures.py --rounds 20" startup.py nodes.py "scale.py 8 64 512" \
		"faults.py --quick" "verdicts.py --seeds 1" "layers.py --quick" "check.py --quick" "check_cost.py --pairs 1" memory.py dashboard.py terminal.py "compare.py --runs 2 --steps 100" "soak.py --seconds 20 --ranks 2"; do \
		echo "== $$run"; $(PY) benchmarks/$$run; done

# The versions that pyproject.toml promises: its oldest torch and Ray, and the newest there are. 6 GB each.
compat: compat-oldest compat-newest

compat-%:
	@test -x .venv-$*/bin/pip || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --progress-bar off --upgrade -e '.[dev]' $(COMPAT_$*)
	@$(call run_tests,.venv-$*/bin/python,-q $(COMPAT_TESTS))
	@.venv-$*/bin/python benchmarks/figures.py

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "$(CURDIR)/build/site/index.html (to search in it: python -m http.server -d build/site)"

screenshots: $(INSTALLED)
	$(PY) docs/symptom_pictures.py docs/img >build/scenes.txt
	$(PY) docs/screenshots.py docs/img

plotly:
	node docs/plotly_bundle.mjs dash_app/assets

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt tests/frameworks/requirements.txt
	@echo "Setting up $(FRAMEWORKS): torch, ray and the frameworks, several minutes." >&2
	@test -x $(FRAMEWORKS)/bin/pip || $(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/pip install -q -c constraints.txt -e '.[train]' -r tests/frameworks/requirements.txt >&2
	@$(FRAMEWORKS)/bin/pip install -q --no-deps --target $(FRAMEWORKS)/timm timm==1.0.31 >&2
	@touch $@

# Importing compiles: here the modules that most tests import, before several processes do so at the same time.
# Compiling all of torch and ray would take a third of the installation time.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit( \
		"Python 3.10 or newer is needed; %s is %d.%d. Try: make PYTHON=python3.12" % (sys.executable, v[0], v[1]))'
	@echo "Setting up .venv: torch and ray are large, so this takes from half a minute to several minutes."
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(PY) -m pip install --no-compile --progress-bar off -c constraints.txt -e '.[dev]' | tee .venv/install.log | sed -u -n -E \
		-e 's/^ *Downloading ([^ ]+) \(([0-9]{2,}\.[0-9]+ MB|[0-9.]+ GB)\).*/  downloading \1, \2/p' \
		-e 's/^Installing collected packages.*/  installing/p' || { tail -n 20 .venv/install.log; exit 1; }
	@$(PY) -c 'import torch.distributed.run' & $(PY) -c 'import dash, hypothesis, ray.data'; wait $$!
	@touch $@
