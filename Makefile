# `make help` lists the targets. Each creates .venv first if needed, without root.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PEERS := .bench
GPU_PYTHON ?= python3
GPU_RESULTS ?= benchmarks/results/gpu
INSTALLED := $(VENV)/.installed
PIP_LOG := $(VENV)/install.log
PIP_OPTIONS := --disable-pip-version-check --no-input --progress-bar off
TO_LOG := >>$(PIP_LOG) 2>&1 || { tail -n 5 $(PIP_LOG) >&2; echo "pip failed: the whole log is $(PIP_LOG)" >&2; exit 1; }
PROTO := services/contracts/recommend.proto
TORCH_INDEX := $(if $(TORCH_INDEX_URL),--index-url "$(TORCH_INDEX_URL)")# of another build of torch, such as the CPU's: `make up TORCH_INDEX_URL=...`
UNIT := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help up down status test test-unit test-grids test-compose lint format proto slo chart helm docs typescript bench bench-peers gpu-check lock client

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

up: $(INSTALLED) ## start the whole stack here; the first time it also trains on MovieLens-100k
	@TAILRACE_LLM_ROUTING=$${TAILRACE_LLM_ROUTING:-always} exec $(BIN)/tailrace up

down: $(INSTALLED) ## stop it, and remove leftover processes
	@exec $(BIN)/tailrace down

status: $(INSTALLED) ## show each part, its port and its health
	@exec $(BIN)/tailrace status

test: $(INSTALLED) ## run all that a change must pass, the whole stack included
	$(UNIT) tests/unit
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder tests/integration tests/gpu
	$(BIN)/pytest tests/e2e

test-unit: $(INSTALLED) ## run the pure tests: no server, no compiler, no Ray
	$(UNIT) -m "not native and not grid" tests/unit

test-grids: $(INSTALLED) ## run the complete grids and scenarios, of which `make test` runs a sample, and the quality of a full training
	$(UNIT) -m grid tests/unit
	$(UNIT) --hypothesis-profile thorough -m "not grid" tests/unit
	$(BIN)/pytest -m grid tests/integration tests/e2e
	$(BIN)/pytest tests/quality

test-compose: $(INSTALLED) ## run the end-to-end tests against docker compose
	$(BIN)/pytest tests/e2e tests/compose --stack compose $(COMPOSE_OPTIONS)

lint: $(INSTALLED) ## check style, types, import directions and test docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/interrogate tests

format: $(INSTALLED) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED) ## regenerate the gRPC code
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PROTO)
	$(BIN)/python -m grpc_tools.protoc -I. -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	  --include_imports --descriptor_set_out=services/client/tailrace_client/messages.binpb $(PROTO) google/rpc/status.proto google/rpc/error_details.proto

client: $(INSTALLED) ## build the wheel of the client that callers install, into dist/
	scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && cp -r services/client/. "$$scratch" && \
	$(BIN)/pip wheel --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist "$$scratch"

docs: $(INSTALLED) ## generate docs/openapi.json, and the pages' tables from benchmarks/results
	$(BIN)/python -m infra.openapi
	$(BIN)/python -m benchmarks.pages

typescript: $(INSTALLED) ## generate the TypeScript client's types from docs/openapi.json, check it and build services/client-typescript/dist
	cd services/client-typescript && export PATH="$(CURDIR)/$(BIN):$$PATH" && npm ci --silent && npm run --silent types && npm run --silent build

slo: $(INSTALLED) ## make rules, alerts, their tests, the objectives' dashboard and the docs' table from infra/prometheus/objectives.yaml
	$(BIN)/python -m infra.slo

chart: $(INSTALLED) ## generate the Helm chart, infra/kubernetes/chart, from the overlays and infra/chart/values.yaml
	$(BIN)/python -m infra.chart

helm: $(INSTALLED) ## put a Helm binary into .venv, for the tests of the chart
	$(BIN)/python -m tests.support.helm

bench: $(INSTALLED) ## measure the running stack: load per tier and door, and freshness
	@$(BIN)/tailrace bench serve --json benchmarks/results/serve.json && exec $(BIN)/tailrace bench freshness --json benchmarks/results/freshness.json

bench-peers: $(INSTALLED) $(PEERS)/vllm/.installed $(PEERS)/llamacpp/.installed ## install the engines that the engine benchmark compares with

gpu-check: ## on a graphics card: check and measure everything in 8 minutes; PART=NAME reruns one step, GPU_PYTHON has torch and triton
	@exec $(GPU_PYTHON) -m benchmarks.gpu $(GPU_RESULTS) $(if $(PART),--part $(PART)) $(if $(TINY),--tiny)

$(PEERS)/vllm/.installed: benchmarks/peers/vllm.lock
	@$(call need-python)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check --require-hashes --no-deps --only-binary :all: --requirement $<
	$(@D)/bin/pip install --disable-pip-version-check $(TORCH_INDEX) --constraint requirements-torch.lock torch
	VLLM_TARGET_DEVICE=cpu $(@D)/bin/python -c 'from vllm.platforms import current_platform; assert current_platform.is_cpu(), current_platform'
	@touch $@

$(PEERS)/llamacpp/.installed: benchmarks/peers/llamacpp.lock
	@$(call need-python)
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check --require-hashes --no-deps --only-binary :all: --no-binary llama-cpp-python --requirement $<
	@touch $@

lock: $(INSTALLED) ## lock what pyproject.toml needs; LOCK_OPTIONS=--upgrade takes the newest versions
	$(BIN)/python -m infra.lock $(LOCK_OPTIONS)

$(INSTALLED): requirements.lock requirements-torch.lock pyproject.toml
	@$(call need-python)
	@echo "install 1/4: virtual environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(PIP_LOG)
	@echo "install 2/4: $$(grep -c '^[^ #]*==' requirements.lock) packages by hash, minutes the first time; pip's log is $(PIP_LOG)"
	@$(BIN)/pip install $(PIP_OPTIONS) --require-hashes --no-deps --only-binary :all: --requirement requirements.lock $(TO_LOG)
	@echo "install 3/4: torch, the largest download"
	@$(BIN)/pip install $(PIP_OPTIONS) $(TORCH_INDEX) --constraint requirements-torch.lock torch $(TO_LOG)
	@echo "install 4/4: tailrace itself"
	@$(BIN)/pip install $(PIP_OPTIONS) --no-deps --no-build-isolation -e . $(TO_LOG)
	@touch $@

define need-python
command -v "$(PYTHON)" >/dev/null && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
{ echo "Tailrace needs Python 3.11, and '$(PYTHON)' is not it. Install python3.11, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
endef
