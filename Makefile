# The index of what can be done in a checkout. Settings, on the command line or in the environment:
#   VENV=DIR     where the Python environment stands (.venv)
#   PYTHON=FILE  the Python that it is made with (the first that fits of python3, python3.14 ... python3.11)
#   NODES=N CONFIG=NAME   of `make demo` (2, digits)
#   ARGS='...'   further arguments of demo, test, test-unit, lock and bench
VENV ?= .venv
NODES ?= 2
CONFIG ?= digits
export VENV PYTHON
python = "$$VENV/bin/python" -P

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-unit lint lock bench venv venv-dev clean clean-venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

demo: venv ## train on two embedded nodes on this machine (NODES=2 CONFIG=digits ARGS=...)
	$(python) -m entrypoint.embedded --nodes $(NODES) -- -m train --config $(CONFIG) $(ARGS)

test: venv-dev ## all tests that need this machine alone: unit, and real torchrun processes
	$(python) -m pytest tests/unit tests/embedded $(ARGS)

test-unit: venv-dev ## the unit tests
	$(python) -m pytest tests/unit $(ARGS)

lint: venv-dev ## ruff, mypy --strict, shellcheck
	@PATH="$$(realpath "$$VENV")/bin:$$PATH" tools/lint.sh

lock: venv-dev ## write requirements/*.txt anew from *.in and containers/stacks.yaml (ARGS=--upgrade)
	$(python) tools/lock.py $(ARGS)

bench: venv-dev ## measure what the documentation claims
	$(python) -m benchmarks $(ARGS)

venv: ## install what training and launching need into VENV, if that has not been done
	@tools/venv.sh "$$VENV" run

venv-dev: ## the same with what tests, lint and lock need
	@tools/venv.sh "$$VENV" dev

clean: ## remove caches and build outputs; the venv and runs/ stay
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info src/*.egg-info
	find entrypoint src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove the venv, if make made it
	@tools/venv.sh "$$VENV" remove
