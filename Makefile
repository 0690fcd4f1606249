# `make serve` runs the demo cluster, `make test` runs every check in its short form. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# pip installs a CPU wheel of torch if it finds one (`pip config`, PIP_FIND_LINKS), otherwise the registry's wheel.
TORCH ?= $(shell $(PYTHON) -c 'import platform; print("torch==2.13.0" if platform.system() == "Linux" else "torch")')

.PHONY: serve test check lint types imports unit clocked unclocked \
  nightly exhaustive chaos cancels soak simulate mutations fuzz schemathesis lock sbom clean

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

# These tests do not depend on wall-clock time; run them at low priority next to the cluster tests.
UNCLOCKED := tests/benchmarks tests/engine tests/gpu_less tests/scheduler tests/simulation
unit:
	@$(MAKE) --no-print-directory -j2 clocked unclocked

clocked:
	$(BIN)/python -m pytest -q $(UNCLOCKED:%=--ignore=%) $(PYTEST)

unclocked:
	nice -n 19 $(BIN)/python -m pytest -q -o timeout=400 $(UNCLOCKED) $(PYTEST) > .venv/unclocked.log 2>&1; \
	  status=$$?; cat .venv/unclocked.log; exit $$status

# The exhaustive forms of the checks in `make test`; takes hours. `make -k nightly` continues after a failure.
# `chaos` and `cancels` also rewrite their files in benchmarks/results.
nightly: exhaustive chaos cancels simulate mutations fuzz schemathesis

# The tests that `make test` leaves out: all kernels compiled for a GPU, and every shape and type.
exhaustive: .venv/tested
	$(BIN)/python -m pytest -q -m exhaustive $(PYTEST)

# Run the fault matrix with real processes; see `python -m tests.chaos --help`.
chaos: .venv/tested
	$(BIN)/python -m tests.chaos $(ARGS)

# Clients disconnect at random moments during random faults.
CANCELS ?= 10000
cancels: .venv/tested
	$(BIN)/python -m tests.chaos cancels --count $(CANCELS)

# Run at half load with one fault per minute; report growth of memory, descriptors and threads.
MINUTES ?= 30
soak: .venv/tested
	$(BIN)/python -m tests.chaos soak --minutes $(MINUTES)

# Simulate whole clusters on a virtual clock, with faults drawn by seed.
SEEDS ?= 10000
simulate: .venv/tested
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

# Each mutation breaks the system in one place; at least one seed must detect it.
MUTATION_SEEDS ?= 60
mutations: .venv/tested
	$(BIN)/python -m tests.simulation --seeds $(MUTATION_SEEDS) --mutate all

# Fuzz every parser of untrusted bytes, guided by coverage if atheris is installed (`pip install atheris`, Linux).
RUNS ?= 1000000
fuzz: .venv/tested
	$(BIN)/python -m tests.fuzz.run --runs $(RUNS) --jobs $$(nproc) $(ARGS)

# Test a live cluster against its own OpenAPI document and, if available, OpenAI's.
CASES ?= 50000
schemathesis: .venv/tested
	$(BIN)/python -m tests.bad_input.conformance --cases $(CASES)

# Resolve the libraries that the image installs from pyproject.toml again, with their hashes.
lock: .venv/installed .venv/tools
	$(BIN)/python deploy/lock.py | .venv/tools/bin/uv pip compile - --quiet --universal --python-version 3.11.3 \
	  --generate-hashes --no-annotate --custom-compile-command "make lock" --output-file requirements.lock

# List the installed packages in CycloneDX format.
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
