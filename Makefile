# Two commands matter: `make serve` runs the demo cluster, `make test` checks everything. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# A CPU wheel of torch where pip finds one (`pip config`, PIP_FIND_LINKS), else the registry's.
TORCH ?= $(shell $(PYTHON) -c 'import platform; print("torch==2.13.0" if platform.system() == "Linux" else "torch")')

.PHONY: serve test check lint types imports unit clocked unclocked chaos soak simulate fuzz schemathesis lock sbom clean

serve: .venv/installed
	$(BIN)/baton up $(ARGS)

test: .venv/tested lint imports
	@$(MAKE) --no-print-directory -j3 types clocked unclocked

check: test

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	nice -n 19 $(BIN)/mypy

imports:
	$(BIN)/lint-imports --no-cache

# What compiles, interprets and simulates asks no clock: as types, it is at low priority in the time that clusters wait.
UNCLOCKED := tests/benchmarks tests/engine tests/gpu_less tests/scheduler tests/simulation
unit:
	@$(MAKE) --no-print-directory -j2 clocked unclocked

clocked:
	$(BIN)/python -m pytest -q $(UNCLOCKED:%=--ignore=%) $(PYTEST)

unclocked:
	nice -n 19 $(BIN)/python -m pytest -q -o timeout=400 $(UNCLOCKED) $(PYTEST) > .venv/unclocked.log 2>&1; \
	  status=$$?; cat .venv/unclocked.log; exit $$status

# The fault matrix with real processes; the same for long, at half load. `--help` of `python -m tests.chaos` says more.
chaos: .venv/tested
	$(BIN)/python -m tests.chaos $(ARGS)

MINUTES ?= 30
soak: .venv/tested
	$(BIN)/python -m tests.chaos soak --minutes $(MINUTES)

# Whole clusters on a virtual clock, faults drawn by seed; `make simulate SEEDS=60 ARGS="--mutate all"` breaks them first.
SEEDS ?= 10000
simulate: .venv/tested
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

# Every reader of bytes from outside; with coverage where atheris is installed (`pip install atheris`, Linux).
RUNS ?= 1000000
fuzz: .venv/tested
	$(BIN)/python -m tests.fuzz.run --runs $(RUNS) --jobs $$(nproc) $(ARGS)

# A live cluster against its own OpenAPI document, and OpenAI's where it is at hand.
CASES ?= 50000
schemathesis: .venv/tested
	$(BIN)/python -m tests.bad_input.conformance --cases $(CASES)

# The libraries that the image installs, with their hashes, anew from pyproject.toml.
lock: .venv/installed .venv/tools
	$(BIN)/python deploy/lock.py | .venv/tools/bin/uv pip compile - --quiet --universal --python-version 3.11.3 \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file requirements.lock

# What is installed here, in CycloneDX's form.
sbom: .venv/installed .venv/tools
	.venv/tools/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-file sbom.json

.venv/tools: .venv/installed
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet uv cyclonedx-bom
	touch $@

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet -e .
	touch $@

.venv/tested: .venv/installed pyproject.toml
	$(BIN)/pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +
