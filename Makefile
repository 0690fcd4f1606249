# `make serve` runs the demo cluster, `make test` runs every check in its short form. Both set up .venv first.
# `make serve MODEL=hybrid` and `MODEL=moe` serve two other demo models; MODEL can be any value of `baton up --model`.
PYTHON ?= python3
BIN := .venv/bin
# pip installs a CPU wheel of torch if it finds one (`pip config`, PIP_FIND_LINKS), otherwise the registry's wheel.
TORCH ?= $(shell $(PYTHON) -c 'import platform; print("torch==2.13.0" if platform.system() == "Linux" else "torch")')

.PHONY: serve test check lint types imports unit \
  nightly chaos cancels soak simulate mutations properties exhaustive sweep fuzz schemathesis clients scale playground lock sbom clean

serve: .venv/installed
	$(BIN)/baton up $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: .venv/tested lint imports
	@$(MAKE) --no-print-directory -j2 types unit

check: test

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	nice -n 19 $(BIN)/mypy

imports:
	$(BIN)/lint-imports --no-cache

# Two workers per core: tests with clusters mostly wait. Each file runs in one worker: its tests share clusters.
WORKERS ?= $(shell echo $$(($$(nproc) * 2)))
# With files of bytecode, the many processes of the tests start sooner.
unit: export PYTHONDONTWRITEBYTECODE =
unit:
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 15 $(PYTEST)

# The exhaustive forms of the checks in `make test`, in sizes for one night on two cores.
# `make -k nightly` continues after a failure. Before a release, run the parts with their own, larger sizes.
nightly: CHAOS = --requests 200 --no-write
nightly: CANCELS_FLAGS = --no-write
nightly: RUNS = 50000
nightly: CASES = 5000
nightly: chaos cancels simulate mutations properties exhaustive fuzz schemathesis

# Tests marked exhaustive: the cases that `make test` leaves out, and all kernels compiled for sm_90.
exhaustive: .venv/tested
	$(BIN)/python -m pytest -q -n $(WORKERS) -m exhaustive

# Run every decoder of transformers; writes the list that `baton models --markdown` shows.
sweep: .venv/tested
	$(BIN)/python -m tests.sweep $(ARGS)

# Property tests with many examples.
properties: .venv/tested
	$(BIN)/python -m pytest -q -n $(WORKERS) --hypothesis-profile nightly $(PROPERTIES)
PROPERTIES := tests/scheduler tests/prefill_node tests/decode_node/test_reservations.py \
  tests/router/test_dispatch.py tests/router/test_overload.py tests/shared/test_codec.py

# Run the fault matrix with real processes; see `python -m tests.chaos --help`. Writes a file in benchmarks/results.
chaos: .venv/tested
	$(BIN)/python -m tests.chaos $(CHAOS) $(ARGS)

# Clients disconnect at random moments during random faults. Writes a file in benchmarks/results.
CANCELS ?= 10000
cancels: .venv/tested
	$(BIN)/python -m tests.chaos cancels --count $(CANCELS) $(CANCELS_FLAGS)

# Run at half load with one fault per minute; report growth of memory, descriptors and threads.
MINUTES ?= 30
soak: .venv/tested
	$(BIN)/python -m tests.chaos soak --minutes $(MINUTES)

# Simulate whole clusters on a virtual clock, with faults drawn by seed.
SEEDS ?= 10000
simulate: .venv/tested
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) $(ARGS)

# Each mutation breaks the system in one place; at least one seed must detect it.
MUTATION_SEEDS ?= 200
mutations: .venv/tested
	$(BIN)/python -m tests.simulation --seeds $(MUTATION_SEEDS) --mutate all

# Fuzz every parser of untrusted bytes, guided by coverage if atheris is installed (`pip install atheris`, Linux).
RUNS ?= 1000000
fuzz: .venv/tested
	$(BIN)/python -m tests.fuzz.run --runs $(RUNS) --jobs $$(nproc) $(ARGS)

# Test a live cluster against its own OpenAPI document and, if available, OpenAI's, and compare both modes.
CASES ?= 50000
schemathesis: .venv/tested
	$(BIN)/python -m tests.bad_input.conformance --cases $(CASES)
	$(BIN)/python -m tests.bad_input.modes

# Run unmodified clients and load tools against a cluster; the first run installs each in .clients. Not in `make test`.
clients: .venv/tested
	$(BIN)/python -m tests.clients $(ARGS)

# Run clusters under the installed orchestrators of docs/scale.md, and kill processes, hosts and routers.
scale: .venv/tested
	$(BIN)/python -m pytest -q -rs -m "exhaustive or not exhaustive" tests/deploy $(PYTEST)

# Write the simulator's page as one HTML file, playground.html, which needs no server. Needs npm.
playground: .venv/installed
	$(BIN)/python deploy/playground.py $(ARGS)

# Lock the versions and hashes of the libraries that the image installs.
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
