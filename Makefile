# make setup | demo | test | lint | plans | bench-setup.  Needs Python 3.11 and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PIP_BENCH := $(VENV)-bench/bin/python -m pip --quiet --disable-pip-version-check
SOURCES := pyproject.toml requirements/constraints.txt requirements/dev.txt
# Named after what the requirement files say: other requirements, another stamp, a new set-up.
STAMP := $(VENV)/setup-$(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)

.PHONY: setup demo test lint plans bench-setup clean

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

# The peers that `torchweft bench overlap` races against, in a venv that sees all of $(VENV):
# then run $(VENV)-bench/bin/torchweft bench overlap.
bench-setup: setup
	$(PYTHON) -m venv --without-pip $(VENV)-bench
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$($(VENV)-bench/bin/python -c 'import site; print(site.getsitepackages()[0])')/layer.pth"
	$(PIP_BENCH) install --no-deps --no-build-isolation -c requirements/constraints.txt \
		-r requirements/bench.txt
	$(PIP_BENCH) install --no-deps --no-build-isolation -e .

clean:
	rm -rf $(VENV) $(VENV)-bench .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
