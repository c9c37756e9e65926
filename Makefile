# make setup | demo | test | test-cuda | test-torch | test-integrations | lint | plans | bench-setup.
# Needs Python 3.11 and a package index.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_IN := bin/python -m pip --quiet --disable-pip-version-check
PIP := $(VENV)/$(PIP_IN)
SOURCES := pyproject.toml requirements/constraints.txt requirements/dev.txt
# Named after what the requirement files say: other requirements, another stamp, a new set-up.
STAMP := $(VENV)/setup-$(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)

# Each host has its tests/integrations/test_NAME*.py, and what they need in requirements/NAME.txt.
HOSTS := transformers vllm

.PHONY: setup demo test test-cuda cuda-setup test-torch test-integrations hosts lint plans bench-setup clean

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
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore tests/integrations --ignore tests/cuda

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Write the golden plans anew; look at `git diff tests/plans` before committing them.
plans: setup
	$(BIN)/python -m pytest tests/pure/test_strategies.py --write-plans

# $(VENV)-NAME sees all of another venv, its torch too. $(call layer_on,NAME,THAT VENV) makes it.
define layer_on
	$(PYTHON) -m venv --without-pip $(VENV)-$(1)
	echo "import site; site.addsitedir('$$($(2)/bin/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$($(VENV)-$(1)/bin/python -c 'import site; print(site.getsitepackages()[0])')/layer.pth"
endef

# A host's sees $(VENV) and adds what requirements/NAME.txt names. It is stamped like $(VENV) itself.
layer_stamp = $(VENV)-$(1)/setup-$(shell cat $(SOURCES) requirements/$(1).txt | cksum | cut -d ' ' -f 1)

define layer
$(call layer_stamp,$(1)): | $(STAMP)
	$$(call layer_on,$(1),$(VENV))
	$(VENV)-$(1)/$(PIP_IN) install --no-deps --no-build-isolation -r requirements/$(1).txt
	$(VENV)-$(1)/$(PIP_IN) install --no-deps --no-build-isolation -e .
	rm -f $(VENV)-$(1)/setup-*
	touch $$@
endef
$(foreach name,bench $(HOSTS),$(eval $(call layer,$(name))))

# The peers that `torchweft bench overlap` races against:
# then run $(VENV)-bench/bin/torchweft bench overlap.
bench-setup: $(call layer_stamp,bench)

# The hosts, for `torchweft bench hosts` and for their tests: a venv each.
hosts: $(foreach name,$(HOSTS),$(call layer_stamp,$(name)))

# Nothing is skipped: what the tests of a host need has been installed.
test-integrations: $(HOSTS:%=test-integrations-%)

test-integrations-%: hosts
	$(VENV)-$*/bin/python -m pytest --no-skips tests/integrations/test_$**.py

# The CUDA build of torch, 5 GB with its libraries, outside the checkout: all checkouts share it.
# `===` is this version and no local one of it, such as +cpu.
CACHE := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/torchweft
CUDA_VENV ?= $(CACHE)/cuda-2.13.0
CUDA_STAMP := $(CUDA_VENV)/setup-$(shell cat requirements/cuda.txt | cksum | cut -d ' ' -f 1)

cuda-setup: $(CUDA_STAMP)

$(CUDA_STAMP):
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/$(PIP_IN) install -r requirements/cuda.txt
	rm -f $(CUDA_VENV)/setup-*
	touch $@

# No device is needed: PyTorch's CUDA build on a stand-in that records. Needs gcc and g++.
test-cuda: cuda-setup
	PYTHONPATH=src $(CUDA_VENV)/bin/python -m pytest --no-skips tests/cuda

# All tests with another release of torch: `make test-torch VERSION=2.15.0`. The release and what the
# tests need stand outside the checkout, 5 GB a release; the checkout's layer on it has the project.
VERSION ?= 2.15.0
TORCH_VENV = $(CACHE)/torch-$(VERSION)
TORCH_STAMP = $(TORCH_VENV)/setup-$(shell cat $(SOURCES) | cksum | cut -d ' ' -f 1)

test-torch: $(TORCH_STAMP)
	$(call layer_on,torch-$(VERSION),$(TORCH_VENV))
	$(VENV)-torch-$(VERSION)/$(PIP_IN) install --no-deps --no-build-isolation -e .
	printf '#!/bin/sh\nexec "$$(dirname "$$0")/python" -m torch.distributed.run "$$@"\n' > $(VENV)-torch-$(VERSION)/bin/torchrun
	chmod +x $(VENV)-torch-$(VERSION)/bin/torchrun
	PATH="$(CURDIR)/$(VENV)-torch-$(VERSION)/bin:$$PATH" \
		$(VENV)-torch-$(VERSION)/bin/python -m pytest -n 2 --dist worksteal --ignore tests/integrations --ignore tests/cuda

$(TORCH_STAMP):
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	sed 's/^torch==.*/torch===$(VERSION)/' requirements/constraints.txt > $(TORCH_VENV)/constraints.txt
	$(TORCH_VENV)/$(PIP_IN) install -c $(TORCH_VENV)/constraints.txt torch
	$(TORCH_VENV)/$(PIP_IN) install -c $(TORCH_VENV)/constraints.txt -r requirements/dev.txt
	rm -f $(TORCH_VENV)/setup-*
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
