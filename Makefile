# Two commands do everything on a fresh machine:
#   make demo   set up, then search, validate and export on the built-in demo model
#   make test   set up, then lint, type-check and run all tests
#
# The first set-up compiles llama.cpp (about ten minutes on two cores), and the first test run a llama-server of the same
# source beside it (a quarter of an hour, kept in .cache); later ones take seconds.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUNS   ?= runs
STUDY  ?= demo
TRIALS ?= 40

# Each stage can be repeated: `search` resumes its study, `validate` and `export` start from what it found.
demo: $(VENV)/.ready
	$(BIN)/routing-lab doctor
	$(BIN)/routing-lab search --study $(STUDY) --storage $(RUNS)/studies.db --trials $(TRIALS)
	$(BIN)/routing-lab validate --study $(STUDY) --storage $(RUNS)/studies.db --top 5 --output $(RUNS)/$(STUDY)-certificate.yaml
	$(BIN)/routing-lab export $(RUNS)/$(STUDY)-certificate.yaml

test: $(VENV)/.ready lint llama-server
	$(BIN)/python -m pytest

# Everything but the tests that decode with the real model: seconds instead of minutes.
test-fast: $(VENV)/.ready lint
	$(BIN)/python -m pytest -m 'not model'

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(VENV)/.ready

# LLAMA_CPP_CACHE names another folder to keep it in, CMAKE_ARGS more flags (-DGGML_CUDA=ON).
llama-server: $(VENV)/.ready
	PYTHON=$(BIN)/python sh scripts/build_llama_server.sh

$(VENV)/.ready: pyproject.toml $(wildcard routing_lab/runtime/native/*.cpp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# The llama-server in .cache stays: it depends on nothing in here.
clean:
	rm -rf $(VENV) $(RUNS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find routing_lab -name '*.so' -delete

.PHONY: demo test test-fast lint setup llama-server clean
