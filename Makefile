# Every target builds what it needs; nothing has to be installed before. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
STEPS ?= 20

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
ENGINES := $(VENV)/.engines
SOURCES := memcalc trainers tests docs
# ruff reads no setup.cfg, so its settings stand here.
RUFF := --config 'line-length = 120' --config 'target-version = "py310"'
RULES := --select E4,E7,E9,F,B,C4,I,PT,RUF022,RUF100,SIM,UP,W --ignore PT017,PT018
# Not one a core: real runs in the tests have two and four ranks of their own.
# Files that train come first (tests/conftest.py), so that no long one begins when the other worker is done.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch stands first and pinned, so that no other package picks its version; where that release has
# no wheel for the platform, any torch the trainers support will do.
$(INSTALLED): setup.cfg setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet torch==2.13.0 || $(PY) -m pip install --quiet 'torch>=2.6'
	$(PY) -m pip install --quiet -e '.[train,hf,plot,dev]'
	@touch $@

# DeepSpeed builds with this environment's torch, and compiles its communication on a CPU when it is first used: 20 to 40 s,
# here and once, so that no two tests wait for each other's lock. Without a C++ compiler its tests are left out, but not in CI.
$(ENGINES): $(INSTALLED)
	$(PY) -m pip install --quiet setuptools wheel ninja 'accelerate>=1.2'
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet --no-build-isolation deepspeed==0.19.8 || test -z "$$CI"
	$(PY) -m trainers.backends.deepspeed_build || test -z "$$CI"
	@touch $@

demo: $(INSTALLED) ## recommend a plan for a small GPT on this machine, train it on real text, compare
	rm -rf runs/demo
	$(VENV)/bin/memcalc recommend gpt2-small-text --global-batch 12 --launch --steps $(STEPS) --out runs/demo

test: $(INSTALLED) $(ENGINES) ## all tests, with the doctests of the code and of the docs, two files at a time
	$(PY) -m pytest -q $(TWO)

test-all: $(INSTALLED) $(ENGINES) ## the same, with every real run of the trainers where `test` has one in three
	ALL_RUNS=1 $(PY) -m pytest -q $(TWO)

style: $(INSTALLED)
	$(PY) -m ruff format --check $(RUFF) setup.py $(SOURCES)
	$(PY) -m ruff check $(RUFF) $(RULES) setup.py $(SOURCES)
	$(PY) -m mypy

lint: style ## style, types, and the direction of the imports
	$(PY) -m pytest -q tests/test_imports.py

format: $(INSTALLED) ## rewrite the sources in the style that lint asks for
	$(PY) -m ruff check $(RUFF) $(RULES) --fix setup.py $(SOURCES)
	$(PY) -m ruff format $(RUFF) setup.py $(SOURCES)

docs: $(INSTALLED) ## run the commands shown in the docs again, then build docs/_build
	$(PY) docs/key_tables.py
	$(PY) docs/transcripts.py
	$(PY) docs/published.py
	$(PY) docs/render.py

pictures: $(INSTALLED) ## draw the pictures of the docs; RECORD=1 trains the run that they show anew
	$(PY) docs/screenshots.py $(if $(RECORD),--record)

bench: $(INSTALLED) ## how fast: a cold start, a recommendation, the training loop
	for script in cold_start recommend train_loop; do $(PY) tests/benchmarks/$$script.py || exit; done

mutation: $(INSTALLED) ## plant the faults of tests/faults, one at a time; the tests must catch each
	$(PY) tests/mutation.py

chaos: $(INSTALLED) ## kill ranks, agents and launchers at 50 random moments; every run must end as if nothing had been
	rm -f $(VENV)/chaos.jsonl
	KILLS=$${KILLS:-50} CHAOS_LOG=$(CURDIR)/$(VENV)/chaos.jsonl $(PY) -m pytest -q tests/trainers/test_chaos.py
	$(PY) -m tests.trainers.chaos $(VENV)/chaos.jsonl > docs/validation/chaos.md

validate: $(INSTALLED) ## 57 small plans trained on this machine's CPUs, each against its estimate
	$(PY) -m memcalc validate --quick

gpu-check: ## the same on one CUDA GPU, in 8 minutes; needs torch and numpy, installs nothing
	$(PYTHON) -m trainers.gpu_check --out docs/validation

# mypy and DeepSpeed's compiler keep a core busy each. Directions of imports, transcripts, tables and the building of the docs are
# among the tests: `lint` and `docs` would run them once more.
check: $(INSTALLED) ## what CI runs: style and types, all tests, `validate` and `demo`
	$(MAKE) --no-print-directory --jobs 2 style $(ENGINES)
	$(MAKE) --no-print-directory test
	$(MAKE) --no-print-directory validate
	$(MAKE) --no-print-directory demo

clean: ## remove everything that make made
	rm -rf $(VENV) build dist *.egg-info docs/_build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test test-all style lint format docs pictures bench mutation chaos validate gpu-check check clean
