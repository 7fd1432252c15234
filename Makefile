# Two commands set everything up: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help install demo test shapes test-bare test-slow sanitize check format bench fault clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## build .venv with everything that is tested

# torch goes first and alone: with the pinned build in place, no other package can pull in a larger one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[all,dev]'
	touch $(STAMP)

demo: $(STAMP)   ## train four position methods, evaluate them at 1 to 16 times their length, write the report
	$(BIN)/trainshort demo

# Two workers with one torch thread each: more threads than cores make torch slower, not faster.
test: $(STAMP)   ## the default tests, and the shapes in the signatures
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
	$(MAKE) --no-print-directory shapes
	$(MAKE) --no-print-directory test-bare

# This runs in a separate process, because the hook that checks every annotated shape breaks torch.compile.
# Tests of invalid arguments are left out, because the hook raises its own error before ours.
CHECKED := trainshort.alibi,trainshort.attention,trainshort.model
shapes: $(STAMP)  ## the tests of the tensor functions, with every annotated shape checked
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -k 'not mistakes_are_explained and not arguments_are_rejected and not unknown_bias_type' \
	  --jaxtyping-packages=$(CHECKED),beartype.beartype \
	  tests/test_alibi.py tests/attention/test_functional.py tests/attention/test_windowed_torch.py tests/model/positions \
	  tests/model/test_transformer.py tests/model/test_embeddings.py tests/model/test_cache.py

# No compiler and nothing built before: everything must work in plain PyTorch, and say so.
test-bare: $(STAMP)  ## attention, caches, generation, model and evaluation without compiled code
	empty=$$(mktemp -d) && CC=no-such-compiler TRAINSHORT_CACHE=$$empty OMP_NUM_THREADS=1 \
	  $(BIN)/python -m pytest -n 2 --dist worksteal tests/attention/test_functional.py tests/attention/test_windowed_torch.py \
	  tests/attention/test_windowed_calls.py tests/attention/kernels tests/model/test_cache.py tests/generate \
	  tests/model/test_transformer.py tests/evaluate/test_sweep.py tests/evaluate/test_evaluate_command.py; \
	  status=$$?; rm -rf $$empty; exit $$status

test-slow: $(STAMP)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow

sanitize: $(STAMP)  ## the tests of the C kernels, with AddressSanitizer and UndefinedBehaviorSanitizer
	PYTHON=$(BIN)/python .ci/sanitize

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure speed and memory against peers, in one run
	$(BIN)/python -m benchmarks

fault: $(STAMP)  ## kill, fill the disk, flip bits; print the counts
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m fault -s

clean:           ## remove .venv and caches, never data or runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
