# make demo   set up, then train the embedded model for about a minute
# make test   set up, then run all tests
# make lint   format, lint, types
# make check  both: lint and test
# make test-vllm  run the tests of the vLLM sampler, with vLLM for CPUs in an environment of its own
# make bench  measure against peers, in an environment of its own
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-vllm lint check format bench figures map clean

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

check: lint test

test-vllm:
	PYTHON=$(PYTHON) tests/vllm/setup_env.sh .venv-vllm
	.venv-vllm/bin/python -m pytest tests/vllm

demo: $(INSTALLED)
	$(BIN)/gruppo demo

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	PYTHON=$(BIN)/python benchmarks/setup_peers.sh .venv-bench
	.venv-bench/bin/python benchmarks/core_cpu.py

map: $(INSTALLED)
	$(BIN)/python docs/make_map.py

figures: $(INSTALLED)
	$(BIN)/python docs/figures/draw.py

# torch is pinned by the constraints: a free resolution would fetch gigabytes of CUDA libraries
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-vllm .pytest_cache .ruff_cache .hypothesis
