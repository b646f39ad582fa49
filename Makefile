.DEFAULT_GOAL := help
.PHONY: help demo test install lock

PYTHON_IN_VENV := .venv/bin/python
UV ?= .venv/bin/uv

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: ## make .venv with real vLLM for CPU, the trainer and the demo
	@scripts/install

demo: install ## a tiny model learns sums while it is served (SEED=0 REWARD=judge|random STEPS=n)
	@$(PYTHON_IN_VENV) -m examples.sums $(if $(SEED),--seed $(SEED)) $(if $(REWARD),--reward $(REWARD)) $(if $(STEPS),--steps $(STEPS))

lock: ## look for the newest versions that go together, and write them into requirements/lock.txt
	@test -x $(UV) || scripts/install dev
	@$(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --no-annotate --no-emit-package setuptools --no-emit-package tuneloop-runner \
		--custom-compile-command "make lock" --extra trainer --extra dev -o requirements/lock.txt \
		pyproject.toml requirements/engine-cpu.txt examples/sums/requirements.txt

test: ## install what the tests need and run those that are not slow (WORKERS=n at once, 3)
	@scripts/install dev
	@scripts/compile & scripts/install-clients && wait
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m 'not slow and not soak and not gpu' -n $(or $(WORKERS),3) --dist loadgroup

.PHONY: slow
slow: ## the tests that take long: what starts engines, trainers and clusters of its own, or waits
	@scripts/install dev
	@scripts/install-clients
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m 'slow and not soak and not gpu' -n $(or $(WORKERS),3) --dist loadgroup

.PHONY: contract
contract: ## the tests of what README and the wire promise, slow ones included
	@scripts/install dev
	@scripts/install-clients
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m 'contract and not soak and not gpu' -n $(or $(WORKERS),3) --dist loadgroup

.PHONY: clients
clients: ## the monthly run of real client packages, with the versions that it used
	@scripts/install dev
	@scripts/install-clients
	@$(PYTHON_IN_VENV) scripts/client_versions.py
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m 'not soak and not gpu' -n $(or $(WORKERS),2) --dist loadgroup tests/clients

.PHONY: soak
soak: ## the long versions of what the tests promise: many kills, long runs, every learning curve
	@scripts/install dev
	@scripts/install-clients
	@PYTHONDONTWRITEBYTECODE= $(PYTHON_IN_VENV) -m pytest -m 'soak and not gpu' -n $(or $(WORKERS),2) --dist loadgroup

.PHONY: lowest
lowest: ## the core of the tests with the lowest, and with the newest, versions that pyproject.toml allows
	@test -x $(UV) || scripts/install dev
	@scripts/bounds

.PHONY: audit
audit: ## known vulnerabilities of the versions in requirements/lock.txt; fails where no advisory service can be reached
	@test -x $(UV) || scripts/install dev
	@scripts/audit

.PHONY: sbom
sbom: ## build/sbom.cdx.json: what tuneloop is made of, in CycloneDX's format
	@test -x $(UV) || scripts/install dev
	@scripts/sbom

.PHONY: docs
docs: ## build/site: the documentation as a site that is read offline
	@test -x $(VENV)/bin/mkdocs || scripts/install dev
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "build/site/index.html"

.PHONY: release-check
release-check: ## what a release needs: packages, site, bill of materials, deployment files, an upgrade while serving, a restore, signed sums
	@scripts/release-check

.PHONY: check
VENV ?= .venv

check: ## style, types, import contracts, and the house's rules: names, sizes, options
	@test -x $(VENV)/bin/lint-imports || scripts/install dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@scripts/links build/links
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports
	@$(VENV)/bin/python -m pytest -q tests/house
