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
OUT =
PREFIX =
RECIPE =
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
IMAGES = PYTHONPATH=ci:recipes/bascule-tools/src $(BIN)/python -m images
IMAGE_OPTIONS = $(if $(BASE),--base "$(BASE)") $(if $(BASE_IMAGE),--base-image "$(BASE_IMAGE)") $(if $(ENGINE),--engine "$(ENGINE)") $(if $(OUT),--out "$(OUT)") $(ARGS)
CXX_SOURCES = $(shell find ddl/include ddl/csrc lms/src tests -name '*.cc' -o -name '*.h' -o -name '*.c')
BUNDLE = PYTHONPATH=ci:recipes/bascule-tools/src $(BIN)/python -m bundle $(if $(OUT),--out "$(OUT)")
BUNDLE_OPTIONS = $(if $(BASE),--base "$(BASE)") $(ARGS)
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-integrations lint format bench bench-lms bench-bookkeeping bench-links bench-ddl bench-training bench-bundle bench-images channel render env mirror image images context chart horovod-suite gpu-check clean

help: ## list what make can do here
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

setup: ## put everything that the other targets need into .venv; does nothing the second time
	@ci/setup

demo: setup ## train a 3D U-Net on a whole brain in less memory than it needs: the table, a report and the proof
	$(BIN)/python examples/brain_mri/demo.py

test: setup ## the tests, less the slow ones, two at a time (ARGS="-k NAME" goes to pytest)
	$(PYTEST) -m "not slow" -n 2 $(ARGS)

test-all: setup ## every test, and both commands on a fresh Debian (needs root; installs mmdebstrap where it is missing)
	ci/install_tools
	ci/chart_tools
	$(PYTEST) $(ARGS)

test-integrations: setup ## Accelerate, Lightning and Ray Train over DDL, in an environment of their own (out/integrations)
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

bench: bench-lms bench-links bench-ddl bench-training ## all benchmarks (ARGS="--quick" shows that they run)

bench-lms: setup ## measure LMS against plain training, other allocators, checkpointing and the system's swap; JSON to out/bench/
	ci/install_tools libjemalloc2
	$(BIN)/python lms/bench $(ARGS)

bench-bookkeeping: setup ## measure LMS's own work for a saved tensor (ARGS="--against ../other-checkout"); JSON to out/bench/
	$(BIN)/python lms/bench/bookkeeping.py $(ARGS)

bench-links: setup ## measure `lms link` beside fio, a memcpy in C++ and a disk that the kernel throttles (needs root); JSON to out/bench/
	ci/install_tools fio
	$(BIN)/python lms/bench/links $(ARGS)

bench-ddl: setup ## measure DDL's allreduce beside gloo, Open MPI and MPICH on a virtual cluster (needs root); JSON to out/bench/
	$(BIN)/python ddl/bench $(ARGS)

bench-training: setup ## measure a training step over DDL beside gloo on a virtual cluster (needs root); JSON to out/bench/
	$(BIN)/python ddl/bench/training.py $(ARGS)

bench-bundle: setup ## measure the conda side from nothing: channel, environment, training, mirror; JSON to out/bench-bundle/
	PYTHONPATH=ci:recipes/bascule-tools/src $(BIN)/python -m bundle --out "$(or $(OUT),out/bench-bundle)" bench $(if $(FRAMEWORKS),--frameworks $(FRAMEWORKS)) $(BUNDLE_OPTIONS)

bench-images: setup ## measure images and containers: sizes, and what a user waits for (needs root and podman); JSON to out/bench-images/
	PYTHONPATH=ci:recipes/bascule-tools/src $(BIN)/python -m images.bench $(if $(OUT),--out "$(OUT)") $(ARGS)

channel: setup ## build, test and index the conda packages: out/channel (FRAMEWORKS="pytorch tensorflow", BASE=conda-forge)
	$(BUNDLE) channel $(if $(FRAMEWORKS),--frameworks $(FRAMEWORKS)) $(BUNDLE_OPTIONS)

render: setup ## print RECIPE=recipes/ddl/meta.yaml as rattler-build reads it
	@$(BUNDLE) render $(or $(RECIPE),meta.yaml)

env: setup ## install ENV=pytorch (a file of envs/) from out/channel into PREFIX=out/envs/pytorch, without conda, and try it
	$(BUNDLE) env $(or $(ENV),pytorch) $(if $(PREFIX),--prefix "$(PREFIX)") $(BUNDLE_OPTIONS)

mirror: setup ## copy out/channel and all that ENVS="base pytorch" need to out/mirror and a tar, for machines without a network
	$(BUNDLE) mirror $(or $(ENVS),base pytorch) $(BUNDLE_OPTIONS)

image: setup ## build the container image of ENV=pytorch (BASE_IMAGE=debian:bookworm-slim, ENGINE=podman)
	$(IMAGES) $(or $(ENV),pytorch) $(IMAGE_OPTIONS)

images: setup ## build the images ENVS="base pytorch tensorflow"
	$(IMAGES) $(or $(ENVS),base pytorch tensorflow) $(IMAGE_OPTIONS)

context: setup ## lay out what goes into the image of ENV=pytorch, and leave its build to you: out/images/pytorch/context
	$(IMAGES) $(or $(ENV),pytorch) --context-only $(IMAGE_OPTIONS)

chart: setup ## lint the Helm chart with helm 3 and 4, and pack it into out/chart
	ci/chart

horovod-suite: setup ## Horovod's own tests of its names for PyTorch, over DDL on 2 and 4 ranks, on a copy of HOROVOD=path's sources
	$(BIN)/python ci/horovod_suite "$(HOROVOD)" $(ARGS)

gpu-check: ## the GPU's tests and benchmark with PYTHON's own torch, without .venv; to $OUT, or out/gpu
	@OUT="$(GPU_OUT)" ci/gpu_check

clean: ## remove .venv and everything else that is not a source
	rm -rf .venv out .pytest_cache .mypy_cache .ruff_cache .hypothesis lms/dist ddl/dist ddl/build
	find . -name .git -prune -o -name __pycache__ -exec rm -rf {} +
