# Build inputs; the defaults are the public ones. Hosts with their own certificates or wheels set the variables
# that pip knows (PIP_CERT, PIP_FIND_LINKS) or these; hosts that reach no image registry: `make base-image` once.
BASE_NAME   := kvproof-base
BASE_IMAGE  ?= $(shell docker image inspect $(BASE_NAME) >/dev/null 2>&1 && echo $(BASE_NAME) || echo python:3.11-slim)
CA_BUNDLE   ?= $(or $(wildcard $(PIP_CERT)),/dev/null)
WHEELS      ?= $(or $(wildcard $(PIP_FIND_LINKS)),./images/wheels)

# For the process `docker compose`: who owns the results, and the build inputs above.
HOST_USER   := UID=$(shell id -u) GID=$(shell id -g)
COMPOSE     := env $(HOST_USER) BASE_IMAGE=$(BASE_IMAGE) CA_BUNDLE=$(CA_BUNDLE) WHEELS=$(WHEELS) docker compose

.PHONY: up down docker-engine base-image

up: runs  ## the whole matrix in containers; the exit code is the harness's answer
	$(COMPOSE) up --build --abort-on-container-exit --exit-code-from harness

down:  ## stop the containers, drop the volumes (KV, journals); results in runs/ stay
	$(COMPOSE) down --volumes --remove-orphans

docker-engine:  ## install and start Docker Engine with Compose v2 (Debian, root)
	images/base/docker-engine

base-image:  ## make the base image from Debian packages, for hosts that reach no image registry (Debian, root)
	images/base/base-image $(BASE_NAME)

runs:
	mkdir -p $@
