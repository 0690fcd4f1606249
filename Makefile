# Two commands matter: `make serve` runs the demo cluster, `make test` checks everything. Both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
# A CPU wheel of torch where pip finds one (`pip config`, PIP_FIND_LINKS), else the registry's.
TORCH ?= $(shell $(PYTHON) -c 'import platform; print("torch==2.13.0" if platform.system() == "Linux" else "torch")')

.PHONY: serve test check lint types imports unit clean

serve: .venv/installed
	$(BIN)/baton up $(ARGS)

test: .venv/tested lint types imports unit

check: test

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports --no-cache

unit:
	$(BIN)/python -m pytest -q $(PYTEST)

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
