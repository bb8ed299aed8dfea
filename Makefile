# Both commands do all their own set-up: a virtual environment in the checkout with the tested versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Containers often forbid it. Without it every worker and every child of a test compiles all sources, and pytest rewrites
# all assertions again: 16 of the 35 seconds of processor that each worker takes to collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-lowest test-long test-lab test-rest test-all test-stress test-pretend upstream lint setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "diffrl: setting up $(VENV) with the tested versions (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,tensorboard,wandb]"
	@touch $@

# Two processes with one thread each are a sixth faster than one with two: the layers are small, and the verifier has one.
demo: setup
	@folder=runs/demo; n=2; while [ -e "$$folder" ]; do folder=runs/demo-$$n; n=$$((n + 1)); done; \
	OMP_NUM_THREADS=1 $(BIN)/python -m diffrl.launch --standalone --nproc_per_node 2 -m diffrl \
	    train configs/playground/demo.yaml run_dir=$$folder

# Two workers with one thread each: two torch processes with two threads each would fight for the same two cores.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests --ignore tests/lab

# The same with the lowest versions that pyproject.toml names, in an environment of their own (not in CI: 3 GB more).
LOWEST := .venv-lowest
test-lowest:
	@test -x $(LOWEST)/bin/uv || { $(PYTHON) -m venv $(LOWEST) && $(LOWEST)/bin/python -m pip install --quiet uv; }
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable ".[dev,tensorboard,wandb]"
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist worksteal tests --ignore tests/lab

# The laboratory: the league, the experiments, and the tables and figures of the documentation (see experiments/).
test-lab: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests/lab

# What takes too long for `make test`, but runs on every change in CI: many processes, every recipe, every check of every family, compilation.
test-long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not slow" tests --ignore tests/lab

# Both in one: collected once, and no core waits for the last test of the first (.ci/run).
test-rest: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "(long or lab) and not slow" tests

# The code that rewards come from, into a folder of its own; with it `make test-long` has tests/upstream (about 3 minutes).
upstream: build/upstream/.ready

build/upstream/.ready: tests/upstream/requirements.txt $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/upstream --requirement tests/upstream/requirements.txt
	@touch $@

# The code paths of a GPU on a machine without one: a pretend CUDA device, built here in seconds (needs g++).
test-pretend: setup
	$(BIN)/python tests/pretend/build.py

# The documentation site into build/site: strictly (a broken link fails), and without a network.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "docs: open build/site/index.html"

# Every objective on every family: what `make test` has a covering set of.
test-all: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow" tests

# Kills, damaged folders, hostile configs, rewards and requests: a part of `make test-all`, larger by each script's options.
test-stress: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/stress

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
