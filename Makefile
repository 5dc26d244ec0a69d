# `make demo` and `make test` do all set-up on a machine with Python 3.11 or newer.

PYTHON ?= python3
RANKS ?= 4
# The oldest that pyproject.toml allows, and the newest
TORCH_VERSIONS ?= 2.11.0 2.14.1
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# The newest Megatron-Core needs Python 3.12; one of pyenv's is found, too.
PYTHON312 ?= $(shell for each in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
	$$each -c "import sys; sys.exit(sys.version_info[:2] != (3, 12))" 2>/dev/null && echo $$each && break; done)

.PHONY: demo demo-megatron test test-slow test-exhaustive test-megatron soak chaos integrations quick torch-versions check format coverage docs pages dist bench bench-gpu compare clean

demo: $(VENV)/base  ## train a small GPT on 4 ranks of this machine, two to four minutes, and draw losses and costs
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_gpt.py --picture build/demo.png $(ARGS)

demo-megatron: $(VENV)/ready  ## the same inside Megatron's schedules: pipeline 2 x data 2, without a GPU
	$(BIN)/torchrun --standalone --nproc-per-node 4 examples/train_megatron.py $(ARGS)

# Tests start hundreds of processes, and without cached bytecode each of them would compile layerzero for a second.
export PYTHONDONTWRITEBYTECODE :=
# A worker takes whole files, and has ranks of its own: up to eight processes. WORKERS=0 runs everything in one process.
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test: $(VENV)/ready  ## the default tests
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/ready  ## tests with restarts, kills, timeouts, pages, examples, and some further settings
	$(PYTEST) -m "slow and not exhaustive" $(ARGS)

test-exhaustive: $(VENV)/ready  ## slow tests that test-slow leaves out: further settings, long runs; before a release
	$(PYTEST) -m exhaustive $(ARGS)

soak: $(VENV)/ready  ## five minutes of random programs beside a plain model; ARGS="--seconds 3600 --seed 1000" for more and others
	$(BIN)/python -m tests.soak $(ARGS)

chaos: $(VENV)/ready  ## every fault five times, with real processes; ARGS="--tries 50 --seed 7 --only SIGKILL"
	$(BIN)/python -m tests.chaos $(ARGS)

integrations: $(VENV)/ready  ## integrations with other packages, and comparisons with them
	$(PYTEST) tests/integrations tests/megatron $(ARGS)

test-megatron:  ## layerzero.megatron with the newest Megatron-Core, on Python 3.12; the other tests have an older one
	@if [ -n "$(PYTHON312)" ]; then $(MAKE) $(VENV)-megatron/ready && \
		$(VENV)-megatron/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/megatron $(ARGS); \
	else echo "skipped: megatron-core 0.19 needs Python 3.12, and none was found. Name one in PYTHON312"; fi

QUICK := tests/end_to_end/test_parity.py tests/engine/test_accumulation.py tests/engine/test_grad_attribute.py \
	tests/engine/test_gradient_storage.py tests/layout/test_flat_layout.py tests/sharding/test_errors.py tests/sharding/test_refusals.py

quick: $(VENV)/ready  ## what a change breaks first: parity, accumulation, gradients, layout, errors; under two minutes
	$(PYTEST) $(QUICK) $(ARGS)

torch-versions: $(TORCH_VERSIONS:%=$(VENV)-torch-%/ready)  ## the private names of torch, and make quick, with the oldest and the newest torch
	for version in $(TORCH_VERSIONS); do $(VENV)-torch-$$version/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
		tests/project/test_torch_compat.py $(QUICK) $(ARGS) || exit 1; done

check: $(VENV)/ready  ## without the test suite: format, lint, types, import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff format --check --line-length 78 docs/*.md
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/project/test_imports.py

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff format --line-length 78 docs/*.md
	$(BIN)/ruff check --fix .

coverage: $(VENV)/ready  ## the tests, and which lines of layerzero/ none of them has run; ARGS="tests/end_to_end/test_parity.py" for some
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest --numprocesses $(WORKERS) --dist loadfile $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report $(if $(ARGS),--fail-under=0)

docs: $(VENV)/docs  ## the documentation site, in build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Each worker builds the site, and the pages are divided between the workers.
pages: $(VENV)/docs  ## the site in Chromium: no page is wider than the window, the search finds names
	$(PYTEST) --dist load tests/project/test_site.py $(ARGS)

dist: $(VENV)/ready  ## wheel and source distribution, in dist/
	$(BIN)/pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build

bench: $(VENV)/bench  ## the contests of docs/benchmarks.md, their tables and plots; padding on real models
	$(BIN)/python -m benchmarks.contest --where one-machine $(ARGS)
	$(BIN)/python -m benchmarks.contest --where two-nodes $(ARGS)
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python benchmarks/padding.py

compare: $(VENV)/ready  ## your model with DDP, FSDP2, HSDP and layerzero side by side; MODEL=module:function RANKS=4 ARGS="--unit Block"
	$(if $(MODEL),,$(error MODEL is empty. Set it to the function that builds your model: make compare MODEL=module:function))
	$(BIN)/python -m benchmarks.compare $(MODEL) --ranks $(RANKS) $(ARGS)

bench-gpu:  ## on a machine with one GPU and a CUDA build of torch; CALL=1 takes nine minutes, CALL=2 three: docs/gpu.md
	$(PYTHON) -m benchmarks.gpu $(if $(CALL),--call $(CALL)) $(if $(NCCL),--nccl $(NCCL)) $(ARGS)

# What the demo needs, without Megatron-Core and the training frameworks
$(VENV)/base: requirements.txt constraints.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/ready: $(VENV)/base requirements-megatron.txt requirements-loops.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-megatron.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements-loops.txt
	touch $@

$(VENV)-megatron/ready: requirements.txt constraints.txt requirements-megatron-0.19.txt setup.py pyproject.toml
	$(PYTHON312) -m venv $(VENV)-megatron
	$(VENV)-megatron/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(VENV)-megatron/bin/pip install --quiet --disable-pip-version-check --no-deps -r requirements-megatron-0.19.txt
	$(VENV)-megatron/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# The packages of the tests, with another torch, which chooses its setuptools
$(VENV)-torch-%/ready: requirements.txt constraints.txt setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)-torch-$*
	sed -n '/^setuptools/d; s/^torch==.*/torch==$*/; s/ *#.*//; /==/p' requirements.txt > $(VENV)-torch-$*/requirements.txt
	$(VENV)-torch-$*/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $(VENV)-torch-$*/requirements.txt
	$(VENV)-torch-$*/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/docs: $(VENV)/ready requirements-docs.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

# DeepSpeed compiles nothing when installed so; it looks for torch while it is built, hence no isolation.
$(VENV)/bench: $(VENV)/ready requirements-bench.txt
	$(BIN)/pip install --quiet --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation \
		-r requirements-bench.txt
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-megatron $(VENV)-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
