# The index of what can be done in a checkout. Settings, on the command line or in the environment:
#   VENV=DIR     where the Python environment stands (.venv)
#   PYTHON=FILE  the Python that it is made with (the first that fits of python3, python3.14 ... python3.11)
#   NODES=N CONFIG=NAME   of `make demo` (2, digits)
#   STACK=NAME BASE=auto EXTRA=FILE OFFLINE=DIR IMAGE=FILE   of `make image` (docs/containers.md)
#   ARGS='...'   further arguments of demo, test, test-unit, lock and bench
VENV ?= .venv
NODES ?= 2
CONFIG ?= digits
IMAGE_VENV ?= .venv-image
STACK ?=
BASE ?= auto
EXTRA ?=
OFFLINE ?=
IMAGE ?=
export VENV PYTHON IMAGE_VENV STACK BASE EXTRA OFFLINE IMAGE
python = "$$VENV/bin/python" -P
build = "$$IMAGE_VENV/bin/python" containers/build.py --stack "$$STACK" --base "$$BASE" --extra "$$EXTRA" \
	--offline "$$OFFLINE" --image "$$IMAGE"

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-unit test-cluster test-host test-host-down image image-verify image-inspect lint lock bench venv venv-image venv-dev clean clean-venv

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile

demo: venv ## train on two embedded nodes on this machine (NODES=2 CONFIG=digits ARGS=...)
	$(python) -m entrypoint.embedded --nodes $(NODES) -- -m train --config $(CONFIG) $(ARGS)

test: venv-dev ## all tests that need this machine alone: unit, and real torchrun processes
	$(python) -m pytest tests/unit tests/embedded $(ARGS)

test-unit: venv-dev ## the unit tests
	$(python) -m pytest tests/unit $(ARGS)

test-cluster: venv-dev ## tests on a test host with real Apptainer; builds the image (root, Debian)
	$(python) -m pytest tests/cluster $(ARGS)

test-host: venv-dev ## a shell on a test host: Debian 13 with Apptainer (root, Debian)
	$(python) -m tests.host up --online --bind "$$PWD"
	$(python) -m tests.host shell

test-host-down: venv-dev ## end it
	$(python) -m tests.host down

image: venv-image ## build containers/image.sif (STACK=NAME BASE=auto|debootstrap|docker EXTRA=FILE OFFLINE=DIR)
	@$(build) build

image-verify: venv-image ## build the image a second time and compare
	@$(build) verify

image-inspect: venv-image ## print what the image is made of
	@$(build) inspect

lint: venv-dev ## ruff, mypy --strict, shellcheck
	@PATH="$$(realpath "$$VENV")/bin:$$PATH" tools/lint.sh

lock: venv-image ## write all hash locks anew from *.in, containers/stacks.yaml and the mirror (ARGS=--upgrade)
	"$$IMAGE_VENV/bin/python" tools/lock.py $(ARGS)

bench: venv-dev ## measure what the documentation claims
	$(python) -m benchmarks $(ARGS)

venv: ## install what training and launching need into VENV, if that has not been done
	@tools/venv.sh "$$VENV" run

venv-image: ## the same into IMAGE_VENV for building images, without torch
	@tools/venv.sh "$$IMAGE_VENV" image

venv-dev: ## the same with what tests, lint and lock need
	@tools/venv.sh "$$VENV" dev

clean: ## remove caches and build outputs; the venv and runs/ stay
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info src/*.egg-info
	find entrypoint src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove the venv, if make made it
	@tools/venv.sh "$$VENV" remove
