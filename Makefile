# make demo   trains a small capped model on real text, two minutes on two CPU cores
# make test   lint, types, tests, wheel and sdist
# Both first make .venv, if needed: they find a Python >= 3.12 by themselves.
#
# JAXCAP_PYTHON=python3 make test   uses that interpreter as it is, without any set-up: for a
#                                   machine that is offline and already has JAX and Flax
# make test ARGS="-m gpu -x"        more arguments for pytest

VENV ?= .venv
ARGS ?=
comma := ,

ifdef JAXCAP_PYTHON
PYTHON := $(JAXCAP_PYTHON)
else
PYTHON := $(VENV)/bin/python
endif

.DEFAULT_GOAL := help
.PHONY: help setup setup-to-compile demo test lint fuzz bench scaling table clean distclean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup:
ifndef JAXCAP_PYTHON
	@tools/setup_venv.sh "$(VENV)"
endif

setup-to-compile:
ifndef JAXCAP_PYTHON
	@tools/setup_venv.sh "$(VENV)" compile
endif

demo: setup
	$(PYTHON) -m examples.gemma2.train $(ARGS)

test: setup-to-compile
	$(PYTHON) tools/check.py lint tests $(if $(JAXCAP_PYTHON),--as-is) -- $(ARGS)

lint: setup
	$(PYTHON) tools/check.py lint $(if $(JAXCAP_PYTHON),--as-is)

# Thousands of random draws instead of some 200, and every kind of context parallelism for every case.
fuzz: setup
	HYPOTHESIS_PROFILE=thousands $(PYTHON) tools/check.py tests $(if $(JAXCAP_PYTHON),--as-is) -- -m fuzz $(ARGS)

# A shape that a CPU can do; on a GPU: make bench ARGS="--cases d128_causal_8k".
bench: setup
	$(PYTHON) -m benchmarks.import_time
	$(PYTHON) -m jaxcap.cli bench $(or $(ARGS),--q 1$(comma)1024$(comma)4$(comma)64 --causal)

# Context parallelism on all GPUs of this machine, at most 10 minutes; on a CPU: make scaling ARGS="--platform cpu".
scaling: setup
	$(PYTHON) -m benchmarks.scaling $(ARGS)

# Writes the table of features by backend into the README.
table: setup
	$(PYTHON) tools/feature_table.py --write

clean:
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -path './$(VENV)' -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -f "$(VENV)/.jaxcap-set-up" # first: an interrupted rm must not look finished
	rm -rf "$(VENV)"
