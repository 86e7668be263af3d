# `make` alone lists what there is. Every target that needs .venv makes it first.

PYTHON ?= python3
# These are what the command line says, and nothing that happens to be in the environment: ENV is a variable of sh's own,
# PREFIX one of many builds'. PYTHON is taken from there, and so is gpu-check's OUT.
GPU_OUT := $(OUT)
ARGS =
BASE =
BASE_IMAGE =
ENGINE =
ENV =
ENVS =
FRAMEWORKS =
HOROVOD =
KERAS =
OUT =
PREFIX =
TENSORFLOW =
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# What builds C++ under the sanitizers, conda packages and container images: minutes each, and a target of their own.
BUILDS = tests/ddl/test_native.py tests/ci/bundle tests/envs/images
WITHOUT_BUILDS = $(BUILDS:%=--ignore=%)
# 77: there are none for this machine, and the tests that need them are skipped.
CHART_TOOLS = "$(PYTHON)" ci/chart_tools || [ $$? = 77 ]
IN_CI = PYTHONPATH=ci:recipes/bascule-tools/src out/bundle-env/bin/python -m
IMAGES = $(IN_CI) images
IMAGE_OPTIONS = $(if $(BASE),--base "$(BASE)") $(if $(BASE_IMAGE),--base-image "$(BASE_IMAGE)") $(if $(ENGINE),--engine "$(ENGINE)") $(if $(OUT),--out "$(OUT)") $(ARGS)
CXX_SOURCES = $(shell find ddl/include ddl/csrc ddl/src lms/src tests -name '*.cc' -o -name '*.h' -o -name '*.c')
BUNDLE = $(IN_CI) bundle $(if $(OUT),--out "$(OUT)")
BUNDLE_OPTIONS = $(if $(BASE),--base "$(BASE)") $(ARGS)
export PYTHON
# Many container images set it: each process would compile torch again when it imports it, which takes as long again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-tensorflow test test-builds test-root test-all test-tensorflow test-integrations lint format versions docs bench bench-lms bench-bookkeeping bench-tune bench-links bench-ddl bench-training setup-bundle bench-bundle channel env mirror image images context chart horovod-suite gpu-check clean

help: ## list what make can do here
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup: ## put everything that the other targets need into .venv; does nothing the second time
	@ci/setup

demo: setup ## train a 3D U-Net on a whole brain in less memory than it needs: the table, a report and the proof
	$(BIN)/python examples/brain_mri/demo.py

demo-tensorflow: ## the same in Keras: a 3D U-Net plain and with LMS, the table and the proof
	@ci/setup_tensorflow
	out/tensorflow$(TENSORFLOW:%=-%)/bin/python examples/brain_mri/demo_keras.py

test: setup ## the tests that are neither slow nor in test-builds or test-root, three at a time (ARGS="-k NAME" goes to pytest)
	@$(CHART_TOOLS) || [ -z "$$CI" ] # without a network their tests are skipped, which CI does not take
	$(PYTEST) -m "not slow and not root" -n 3 $(WITHOUT_BUILDS) $(ARGS)

test-builds: setup ## the C++ tests under the sanitizers, and the tests of conda packages and images, which are built (needs root)
	@$(CHART_TOOLS) || [ -z "$$CI" ]
	$(PYTEST) -m "not slow" -n 2 $(BUILDS) $(ARGS)

test-root: setup ## the tests that need root, most of them on a virtual cluster of this machine
	$(PYTEST) -m "root and not slow" -n 2 $(WITHOUT_BUILDS) $(ARGS)

test-all: setup ## every test, and make demo, test and test-builds on a fresh Debian (needs root; installs mmdebstrap where it is missing)
	ci/install_tools
	@$(CHART_TOOLS)
	$(PYTEST) $(ARGS)

test-tensorflow: setup ## the tests with TensorFlow and Keras, in an environment of their own (TENSORFLOW=2.16.2 KERAS=3.3.3)
	@ci/setup_tensorflow
	TF_CPP_MIN_LOG_LEVEL=2 out/tensorflow$(TENSORFLOW:%=-%)/bin/python -m pytest tests/lms/tensorflow tests/ddl/tensorflow $(ARGS)

test-integrations: setup ## Accelerate, Lightning, Ray, Dask and MLflow with LMS and DDL, in an environment of their own (out/integrations)
	ci/integrations

lint: setup ## ruff, a strict type checker and clang-format over the sources
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	ci/types

format: setup ## write the sources as `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

versions: setup ## write the version in VERSION, and those in conda_build_config.yaml, wherever they stand
	$(BIN)/python ci/versions

docs: setup ## write the site to out/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . out/docs
	@echo out/docs/docs/index.html

bench: bench-lms bench-links bench-ddl bench-training ## all benchmarks (ARGS="--quick" shows that they run)

bench-lms: setup ## measure LMS against plain training, other allocators, checkpointing and the system's swap; JSON to out/bench/
	ci/install_tools libjemalloc2
	$(BIN)/python lms/bench $(ARGS)

bench-bookkeeping: setup ## measure LMS's own work for a saved tensor (ARGS="--against ../other-checkout"); JSON to out/bench/
	$(BIN)/python lms/bench/bookkeeping.py $(ARGS)

bench-tune: setup ## measure `lms tune` beside a loop of sh, and two trials at once (needs root, half an hour); JSON to out/bench/
	$(BIN)/python lms/bench/tune.py $(ARGS)

bench-links: setup ## measure `lms link` beside fio, a memcpy in C++ and a disk that the kernel throttles (needs root); JSON to out/bench/
	ci/install_tools fio
	$(BIN)/python lms/bench/links $(ARGS)

bench-ddl: setup ## measure DDL's allreduce beside gloo, Open MPI and MPICH on a virtual cluster (needs root); JSON to out/bench/
	$(BIN)/python ddl/bench $(ARGS)

bench-training: setup ## measure a training step over DDL beside gloo on a virtual cluster (needs root); JSON to out/bench/
	$(BIN)/python ddl/bench/training.py $(ARGS)

setup-bundle: ## the same for channel, env, mirror and image alone, which need no torch: out/bundle-env
	@ci/setup bundle

bench-bundle: setup-bundle ## time channel, environment, mirror and images (ARGS="--image base") from nothing; JSON to out/bench-bundle/
	$(IN_CI) bundle.bench "$(or $(OUT),out/bench-bundle)" $(BUNDLE_OPTIONS)

channel: setup-bundle ## build, test and index the conda packages: out/channel (FRAMEWORKS="pytorch tensorflow", BASE=stand-in)
	$(BUNDLE) channel $(if $(FRAMEWORKS),--frameworks $(FRAMEWORKS)) $(BUNDLE_OPTIONS)

env: setup-bundle ## install ENV=pytorch (a file of envs/) from out/channel into PREFIX=out/envs/pytorch, without conda, and try it
	$(BUNDLE) env $(or $(ENV),pytorch) $(if $(PREFIX),--prefix "$(PREFIX)") $(BUNDLE_OPTIONS)

mirror: setup-bundle ## copy out/channel and all that ENVS="base pytorch" need to out/mirror and a tar, for machines without a network
	$(BUNDLE) mirror $(or $(ENVS),base pytorch) $(BUNDLE_OPTIONS)

image: setup-bundle ## build the container image of ENV=pytorch, and the channel if there is none (BASE_IMAGE=..., ENGINE=podman)
	$(IMAGES) $(or $(ENV),pytorch) $(IMAGE_OPTIONS)

images: setup-bundle ## build the images ENVS="base pytorch tensorflow"
	$(IMAGES) $(or $(ENVS),base pytorch tensorflow) $(IMAGE_OPTIONS)

context: setup-bundle ## lay out what goes into the image of ENV=pytorch, and leave its build to you: out/images/pytorch/context
	$(IMAGES) $(or $(ENV),pytorch) --context-only $(IMAGE_OPTIONS)

chart: setup ## lint the Helm chart with helm 3 and 4, and pack it into out/chart
	ci/chart

horovod-suite: setup ## Horovod's own tests of its names for PyTorch, TensorFlow and Keras, on 2 and 4 ranks, on a copy of HOROVOD=path's sources
	@ci/setup_tensorflow
	$(BIN)/python ci/horovod_suite "$(HOROVOD)" $(ARGS)

gpu-check: ## the GPU's tests and benchmark with PYTHON's own torch, without .venv; to $OUT, or out/gpu
	@OUT="$(GPU_OUT)" ci/gpu_check

clean: ## remove .venv and everything else that is not a source
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis lms/dist ddl/dist ddl/build
	find . -name .git -prune -o -name __pycache__ -exec rm -rf {} +
