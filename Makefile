# Everyone runs these; continuous integration too. Each does its own set-up, once: a machine
# needs Python 3.11 or newer and make. Choose the Python with `make PYTHON=python3.12 test`, and the
# CPU build of torch with `make TORCH_INDEX=https://download.pytorch.org/whl/cpu test`.

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# Tests start hundreds of processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup demo test shuffle check docs dist schemas bench fuzz load chaos hostile roundtrip timm runtimes clean

help:  ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED)  ## Make the virtual environment and install everything into it

demo: $(INSTALLED)  ## Profile, plan and train two models in stages; see that nothing changed
	$(BIN)/stagewright demo

# A worker more than there are cores, as many tests wait for other processes, and to each worker one
# thread of torch. Tests of a file share fixtures, some of which take half a minute, so a file stays
# with one worker; in the order of the folders, as the last ones are quick.
test: check  ## Run every check, then every test
	OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile --no-loadscope-reorder \
	    --numprocesses $$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

# Test files meet in other workers and in another order, as do the tests in them, drawn from SEED: a
# test that depends on what ran before it fails. `make shuffle SEED=3` repeats an order. Tests of two
# files do not alternate, which would set up the fixtures of a file again and again.
shuffle: $(INSTALLED)  ## Run every test in a random order
	OMP_NUM_THREADS=1 $(BIN)/pytest --random-order-bucket=module \
	    --random-order-seed=$${SEED:-$$(date +%s)} --dist loadfile --no-loadscope-reorder \
	    --numprocesses $$($(BIN)/python -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

check: $(INSTALLED)  ## Run the linters, the type checker and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)  ## Build the documentation site into docs/build
	$(BIN)/sphinx-build --fail-on-warning --keep-going -q -b html docs docs/build
	@echo docs/build/index.html

dist: $(INSTALLED)  ## Build wheel and sdist into dist, and try the wheel in an empty environment
	rm -rf build dist
	$(BIN)/python -m build --quiet
	$(BIN)/python scripts/try_wheel.py

schemas: $(INSTALLED)  ## Write the JSON schemas of the documents again
	$(BIN)/python scripts/write_schemas.py

bench: $(INSTALLED)  ## Compare with torchgpipe
	$(BIN)/python benchmarks/balance.py

fuzz: $(INSTALLED)  ## Ask the service ten thousand generated requests
	$(BIN)/python scripts/fuzz.py

load: $(INSTALLED)  ## Have two hundred clients ask the service, on SQLite and on PostgreSQL
	$(BIN)/python benchmarks/load.py

chaos: $(INSTALLED)  ## Kill server, worker and database at random over fifty jobs
	$(BIN)/python scripts/kill_jobs.py

hostile: $(INSTALLED)  ## Attack the service with a malicious corpus
	$(BIN)/python scripts/hostile.py

roundtrip: $(INSTALLED)  ## Plan GPT-2 and ResNet-50 by way of a service, and compare with the library
	$(BIN)/python scripts/client_round_trip.py

timm: $(INSTALLED)  ## Install timm into .timm, for its rows of docs/evidence/capture.md and their test
	$(PIP_INSTALL) --no-deps --target .timm timm torchvision pillow

# Without what they depend on, which is here or not needed for their parsers; DeepSpeed compiles its
# operations when they are first used, and none is.
runtimes: $(INSTALLED)  ## Install other runtimes into .runtimes, for the tests of exports to them
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-deps --no-build-isolation --upgrade --target .runtimes \
	    megatron-core==0.16.1 torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0 datasets==4.7.0 \
	    deepspeed==0.19.8 hjson==3.1.0 ninja==1.13.2 py-cpuinfo==9.0.0 einops==0.8.2 tyro==1.0.17 \
	    typeguard==4.6.1 docstring_parser==0.18.0 shtab==1.13.0

clean:  ## Remove what was built and cached, but not the virtual environment
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .grimp_cache
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes in the version of constraints.txt: the newest release is tested with nothing here. On
# Linux that of the package index is built for CUDA, 2.7 GB with its libraries; TORCH_INDEX names
# another index, and what it installs is kept by the second step.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(if $(TORCH_INDEX),$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX) torch)
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	    if $$python -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	        echo "$$python -m venv $(VENV)"; exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo 'Stagewright needs Python 3.11 or newer; name one: make PYTHON=...' >&2; exit 1
