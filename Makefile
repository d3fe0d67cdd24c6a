# The index of what can be done in a checkout. Settings, on the command line or, those with ?= below, in the environment:
#   VENV=DIR     where the Python environment stands (.venv); of `make demo`: instead of an active one that fits
#   PYTHON=FILE  the Python that it is made with (the first that fits of python3, python3.14 ... python3.11)
#   NODES=N CONFIG=NAME   of `make demo` (2, digits)
#   IN=venv      where `make demo` trains: in VENV, or in the image (IN=image)
#   STACK=NAME EXTRA=FILE OFFLINE=DIR IMAGE=FILE   of `make image` (docs/containers.md)
#   DIR=DIR      of `make venv`: a venv of your own on top of the image, for packages that it lacks
#   CLUSTER=NAME GPUS=N PARTITION= ACCOUNT= TIME= OPTIONS='...' DRY_RUN=1 FOLLOW=1   of `make submit` (docs/site.md)
#   TORCHVISION=DIR   of `make bench ARGS=gpu`: a checkout of github.com/pytorch/vision (docs/training.md)
#   EXAMPLES=DIR      of `make bench ARGS=loop`: a checkout of github.com/pytorch/examples (docs/measurements.md)
#   ARGS='...'   further arguments of demo, test, test-unit, test-gpu, mutants, faults, lock and bench
VENV ?= .venv
NODES ?= 2
CONFIG ?= digits
IMAGE_VENV ?= .venv-image
STACK ?=
EXTRA ?=
OFFLINE ?=
IMAGE ?=
IN = venv
DIR =
CLUSTER =
GPUS =
PARTITION =
ACCOUNT =
TIME =
OPTIONS =
PROFILE =
DRY_RUN =
FOLLOW =
export VENV PYTHON NODES CONFIG IMAGE_VENV STACK EXTRA OFFLINE IMAGE DIR CLUSTER GPUS PARTITION ACCOUNT TIME OPTIONS PROFILE
python = "$$VENV/bin/python" -P
pytest = $(python) -m pytest -n auto --dist loadgroup
lanes = $(python) -m pytest -n 4 --dist loadgroup
default_stack := $(shell sed -n 's/^default: *//p' containers/stacks.yaml)
export image := $(or $(IMAGE),containers/image$(addprefix -,$(filter-out $(default_stack),$(STACK)))$(addprefix -,$(filter-out x86_64,$(shell uname -m))).sif)
unless_given = $(if $(filter file,$(origin VENV)),env -u VENV)
at_hand = $(if $(filter demo,$(MAKECMDGOALS)),$(if $(unless_given),$(shell env -u VENV tools/login-python.sh fits demo && echo fits)))
inside = containers/run.sh "$$image"
gpu_alone = $(filter gpu,$(firstword $(ARGS)))
of_image = --stack "$$STACK" --extra "$$EXTRA" --offline "$$OFFLINE" --image "$$IMAGE"

# A misspelled setting is refused: else `make submit NODE=8` would submit 2 nodes.
settings = VENV PYTHON NODES CONFIG IMAGE_VENV STACK EXTRA OFFLINE IMAGE IN DIR CLUSTER GPUS PARTITION ACCOUNT TIME OPTIONS \
	PROFILE DRY_RUN FOLLOW TORCHVISION EXAMPLES ARGS DEBIAN_MIRROR DEBIAN_SNAPSHOT UV
of_others = APPTRAIN_% PIP_% UV_% APPTAINER_% CUDA_% OMP_% %_proxy %_PROXY CI HOME PATH TMPDIR SHELL MAKEFLAGS
quoted = '$(subst ','\'',$(1))'
near = $(shell cd $(call quoted,$(dir $(firstword $(MAKEFILE_LIST)))) && "$$(tools/login-python.sh any)" -m entrypoint.$(or $(3),core.spelling) $(call quoted,$(1)) $(2))
given := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
unknown := $(firstword $(filter-out $(settings) $(of_others),$(given)))
ifneq ($(unknown),)
$(error $(unknown): no target reads this$(or $(call near,$(unknown),$(settings)),: make help lists what they read))
endif
ifneq ($(filter-out venv image,$(IN)),)
$(error IN=$(IN): give IN=venv or IN=image)
endif

.DEFAULT_GOAL := help
.NOTPARALLEL:
targets = help demo test test-unit test-cluster test-gpu test-host test-host-down cluster cluster-shell cluster-down image image-fetch image-verify image-inspect shell catalogue profiles submit faults mutants lint lock site bench venv venv-image venv-dev clean clean-venv
.PHONY: $(targets)

# So is a word that is no target, before anything is done: else `make submit CLUSTER=lab my_script.py` would submit
# the reference job, and then find that make has nothing to do for my_script.py. It may be a command of apptrain.
other := $(firstword $(filter-out $(targets),$(MAKECMDGOALS)))
as_script = $(if $(filter submit,$(MAKECMDGOALS)),make submit $(MAKEOVERRIDES) ARGS='-- $(other)',./apptrain run -- $(other))
ifneq ($(filter %.py %.sh,$(other)),)
$(error $(other): no target has this name: did you mean $(as_script)?)
else ifneq ($(other),)
$(error $(other): no target has this name$(or $(call near,$(other),$(targets),plan.commands),: make help lists them))
endif

first = demo test venv image shell submit
help: ## list the targets
	@awk -F ':.*## ' -v first=' $(first) ' '/^[a-z-]+:.*## / { line = sprintf("make %-14s %s", $$1, $$2); \
		if (index(first, " " $$1 " ")) lines[$$1] = line; else others = others line "\n" } \
		END { n = split(first, names, " "); for (i = 1; i <= n; i++) print lines[names[i]]; \
		printf "\nfor those who build, test or change apptrain\n%s", others }' Makefile

demo: $(if $(or $(filter image,$(IN)),$(at_hand)),,venv) ## train on two embedded nodes on this machine (NODES=2 CONFIG=digits IN=venv|image ARGS=...)
	$(unless_given) ./apptrain demo $(if $(filter image,$(IN)),--image="$$image") --nodes "$$NODES" --config "$$CONFIG" -- $(ARGS)

test: venv-dev ## all tests: unit, real torchrun processes and, as root on a Debian, real Apptainer and Slurm
	@status=0; export APPTRAIN_TEST_FAILED="$$PWD/.cache/failed"; mkdir -p .cache && rm -f "$$APPTRAIN_TEST_FAILED" || exit; \
	$(pytest) tests/unit tests/embedded $(ARGS) || status=$$?; \
	$(lanes) tests/cluster $(ARGS) || status=$$?; \
	if test -e "$$APPTRAIN_TEST_FAILED"; then cat "$$APPTRAIN_TEST_FAILED"; fi; exit $$status

test-unit: venv-dev ## the unit tests
	$(pytest) tests/unit $(ARGS)

test-cluster: venv-dev ## those with real Apptainer and Slurm; they build the image (root, Debian)
	$(lanes) tests/cluster $(ARGS)

test-gpu: ## what no CPU can try, in 8 minutes, with the CUDA torch that this machine has: docs/training.md (ARGS=--help)
	@tools/gpu.sh gpu $(ARGS)

test-host: venv-dev ## a shell on a test host: Debian 13 with Apptainer (root, Debian)
	$(python) -m tests.host up --online --bind "$$PWD"
	$(python) -m tests.host shell

test-host-down: venv-dev ## end it
	$(python) -m tests.host down

cluster: venv-dev ## a Slurm cluster in namespaces of this machine: docs/cluster.md (root, Debian)
	$(python) -m tests.vcluster up --online --bind "$$PWD" $(ARGS)

cluster-shell: venv-dev ## work on its login host
	$(python) -m tests.vcluster shell

cluster-down: venv-dev ## end it
	$(python) -m tests.vcluster down

image: ## build containers/image.sif (STACK=NAME EXTRA=FILE OFFLINE=DIR)
	@./apptrain image build $(of_image)

image-fetch: ## download and check what `make image` is made from, for a node without a network
	@./apptrain image fetch $(of_image)

image-verify: ## build the image a second time and compare
	@./apptrain image verify $(of_image)

image-inspect: ## print what the image is made of
	@./apptrain image inspect $(of_image)

shell: ## a shell in the image (STACK=NAME IMAGE=FILE)
	@$(inside) bash --norc

catalogue: ## make what `apptrain explain` reads, and docs/troubleshooting.md, of entrypoint/explain/*.yaml
	@python=$$(tools/login-python.sh yaml) && "$$python" tools/catalogue.py

profiles: ## check the site profiles of clusters/ and write their host files (PROFILE=FILE)
	@python=$$(tools/login-python.sh) && "$$python" -m entrypoint.cli.profiles $(if $(PROFILE),"$$PROFILE")

submit: export CALLED_FROM := $(value PWD)
submit: ## submit the job script as a site's profile says (CLUSTER=NAME NODES=2 ARGS='-- CMD' DRY_RUN=1 ...)
	@./apptrain submit $(if $(filter-out 0,$(DRY_RUN)),--dry-run) $(if $(filter-out 0,$(FOLLOW)),--follow) --cluster "$$CLUSTER" --nodes "$$NODES" --gpus-per-node "$$GPUS" \
		--partition "$$PARTITION" --account "$$ACCOUNT" --time "$$TIME" --options="$$OPTIONS" $(ARGS)

faults: venv-dev ## break a training on the Slurm cluster in every way: docs/measurements.md (root, Debian; ARGS=--help)
	$(python) -m tests.faults $(ARGS)

mutants: venv-dev ## change the code in small ways and see whether the tests notice (ARGS='--seed 2', ARGS=--help)
	@$(python) -m tests.mutants $(ARGS)

lint: venv-dev ## ruff, mypy --strict, shellcheck, Python 3.9 for login nodes
	@PATH="$$(realpath "$$VENV")/bin:$$PATH" tools/lint.sh

lock: venv-image ## write all hash locks anew from *.in, containers/stacks.yaml and the mirror (ARGS=--upgrade)
	"$$IMAGE_VENV/bin/python" tools/lock.py $(ARGS)

build/site-venv/made: requirements/site.txt
	rm -rf build/site-venv
	"$$(tools/login-python.sh any)" -m venv build/site-venv
	build/site-venv/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	touch $@

site: build/site-venv/made ## build the pages as a site with search: site/index.html
	@build/site-venv/bin/python tools/site.py

bench: $(if $(gpu_alone),,venv-dev) ## measure what the documentation claims (ARGS=gpu TORCHVISION=DIR: on GPUs, with the torch that is there)
	$(if $(gpu_alone),@tools/gpu.sh,$(python) -m) benchmarks $(ARGS)

venv: ## install what training and launching need into VENV; DIR=DIR makes a venv of your own in the image instead
	@$(if $(DIR),tools/image-venv.sh "$$DIR" "$$image",tools/venv.sh "$$VENV" run)

venv-image: ## what building images needs, without torch, into IMAGE_VENV
	@tools/venv.sh "$$IMAGE_VENV" image

venv-dev: ## what `make venv` installs, and what tests, lint and lock need, into VENV
	@tools/venv.sh "$$VENV" dev

clean: ## remove caches and build outputs; the venv and runs/ stay
	rm -rf build dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info src/*.egg-info
	find entrypoint src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv: ## remove the venv, if make made it
	@tools/venv.sh "$$VENV" remove
