# make setup | demo | test | lint | plans.  Needs Python 3.11 and a package index, nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
SOURCES := pyproject.toml requirements/constraints.txt requirements/dev.txt
# Named after what the requirement files say: other requirements, another stamp, a new set-up.
STAMP := $(VENV)/setup-$(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)

.PHONY: setup demo test lint plans clean

setup: $(STAMP)

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -c requirements/constraints.txt torch==2.13.0
	$(PIP) install -c requirements/constraints.txt -r requirements/dev.txt
	$(PIP) install -c requirements/constraints.txt --no-build-isolation -e .
	rm -f $(VENV)/setup-*
	touch $@

demo: setup
	@mkdir -p demo
	@$(BIN)/torchweft demo --folder demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Write the golden plans anew; look at `git diff tests/plans` before committing them.
plans: setup
	$(BIN)/python -m pytest tests/pure/test_strategies.py --write-plans

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
