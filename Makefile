# make train   trains the example GPT, sharded, in a fresh .venv:  make train ARGS="--devices 4 --zero-stage 2"
# make test    lint, the tests and what they cover;  make test-exhaustive: with every case of their grids
# make lint    ruff and mypy;  make format: what ruff mends
# make test-nightly   what tfdist stands on in Keras, with tomorrow's Keras (keras-nightly), in a .venv-nightly of its own
# make soak    disturbs jobs of several workers and compares them with undisturbed ones:  make soak ARGS="--only 'kill/*' --rounds 20"
# make bench   the benchmarks beside TensorFlow, PyTorch and DeepSpeed:  make bench ARGS="--suite full --torch-python PYTHON"
#
# Needs Python 3.11 or later and make; another interpreter: make test PYTHON=python3.12

PYTHON ?= python3.11
VENV   := .venv
NIGHTLY := .venv-nightly
BIN    := $(VENV)/bin
PIP     = $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: train test test-exhaustive test-nightly soak bench lint format clean
.DEFAULT_GOAL := test

train: $(VENV)/.installed-examples
	$(BIN)/python examples/train_gpt.py $(ARGS)

# Four processes for two cores: tests of failures and restarts wait more than they compute.
test: lint
	$(BIN)/python -m slipcover -m pytest -n 4 --dist worksteal $(ARGS)
	@awk 'END { print "coverage: " $$4 " % of the lines of tfdist; each file: coverage.txt" }' coverage.txt

test-exhaustive:
	$(MAKE) test ARGS='-m "" $(ARGS)'

# The replacements, the private names, and a smoke of parity. Both packages are called `keras` inside, so one has to go first.
test-nightly:
	$(MAKE) VENV=$(NIGHTLY) $(NIGHTLY)/.installed-test
	$(NIGHTLY)/bin/python -m pip --quiet uninstall --yes keras keras-nightly
	$(NIGHTLY)/bin/python -m pip --disable-pip-version-check --quiet install --pre --no-deps keras-nightly
	$(NIGHTLY)/bin/python -m pytest -n 2 tests/keras_hooks tests/test_private_names*.py tests/*/test_private_names_*.py \
		tests/keras_layers/test_normalization.py tests/losses/test_uneven_batches.py tests/strategy/test_optimizer_parity.py $(ARGS)

soak: $(VENV)/.installed-test
	$(BIN)/python -m tests.soak $(ARGS)

bench: $(VENV)/.installed-examples
	$(BIN)/python -m benchmarks.run $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# The stamps below keep a second `make` from installing again; a change of setup.py installs anew.
$(VENV)/.installed-examples: setup.py | $(BIN)/pip
	$(PIP) install --use-pep517 --editable '.[examples]'
	@touch $@

$(VENV)/.installed-test: setup.py | $(BIN)/pip
	$(PIP) install --use-pep517 --editable '.[test,examples]'
	@touch $@

# pip is the last thing that venv installs, so a venv that was cut short is made again.
$(BIN)/pip:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install it, or name another: make PYTHON=python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) $(NIGHTLY) build dist *.egg-info coverage.txt .hypothesis .mypy_cache .pytest_cache .ruff_cache out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
