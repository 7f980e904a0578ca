# Everything a developer runs. It needs make and Python 3.11 or newer, and writes only here.
# Paths are relative, so that a checkout in a folder with a space in its name works too.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
UV_VERSION := 0.13.7

PYTHON_VERSION := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# The name holds the version: another PYTHON makes a new environment instead of using the old one.
FILLED := .venv/filled-for-python-$(PYTHON_VERSION)
WHEEL := .venv/wheel-installed
PEERS := build/peers/filled
POSTGRES_PEERS := build/postgres-peers/filled
AUDIT := build/audit/filled
# oban needs Python 3.12. Where there is a newer Python than ours, the peers on PostgreSQL run on it.
PEERS_PYTHON ?= $(shell for python in python3.14 python3.13 python3.12 \
	"$(HOME)"/.pyenv/versions/3.14*/bin/python "$(HOME)"/.pyenv/versions/3.13*/bin/python \
	"$(HOME)"/.pyenv/versions/3.12*/bin/python "$(PYTHON)"; do \
	"$$python" -c '' 2>/dev/null && echo "$$python" && break; done)

# Three for each two cores: tests wait for servers, commands and timeouts.
TEST_PROCESSES ?= $(shell "$(PYTHON)" -c 'import os; print((3 * len(os.sched_getaffinity(0)) + 1) // 2)' 2>/dev/null || echo auto)

# Folders are in the list as well, because a file that was removed shows only in its folder.
SOURCES := $(shell find src -name __pycache__ -prune -o -print)

# Those that exist; a folder that does not exist yet would be an error for the tools.
CHECKED := $(wildcard src tests benchmarks examples)

# Where this is set, each of the hundreds of processes that the tests start would compile anew what
# it imports. What is compiled lies in __pycache__, and `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup run test test-long check bench-store bench-embedded bench-postgres bench-postgres-long \
	bench-postgres-stalls bench-bulk bench-replay bench-explain bench-forecast bench-http bench-celery bench-pages screenshots \
	fairness audit sbom lock clean \
	python-is-new-enough

help: ## List these targets.
	@echo "make <target>, with one of these targets:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-21s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 chooses the Python; ARGS='-k claim' goes to pytest or to the benchmark."

setup: $(WHEEL) ## Set up .venv with fairturn in it, and do nothing else.

run: $(WHEEL) ## Set up, then open the page with a bulk upload beside quiet customers.
	@$(BIN)/fairturn up --demo --open

test: $(WHEEL) ## Run the tests, on the installed wheel.
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal tests $(ARGS)

test-long: $(WHEEL) ## Run the long tests, at most 60 minutes; it resumes. ARGS=--fresh starts again.
	@$(BIN)/python -m tests.long_run $(ARGS)

check: $(WHEEL) ## Check style, format, types, the rules of the architecture, and the languages.
	@echo "Checking the style."
	@$(BIN)/python -m ruff check --quiet $(CHECKED)
	@echo "Checking the format."
	@$(BIN)/python -m ruff format --check --quiet $(CHECKED) || { \
		echo "These files are not formatted: $(BIN)/python -m ruff format $(CHECKED)"; exit 1; }
	@echo "Checking the types."
	@$(BIN)/python -m mypy --strict $(CHECKED)
	@echo "Checking the architecture."
	@$(BIN)/python -m pytest -q tests/test_architecture.py
	@echo "Checking the languages."
	@$(BIN)/python -m pytest -q tests/test_locales.py

bench-store: $(WHEEL) ## Measure the stores.
	@$(BIN)/python -m benchmarks.store $(ARGS)

bench-embedded: $(WHEEL) $(PEERS) ## Measure the worker beside other queues.
	@$(BIN)/python -m benchmarks.embedded $(ARGS)

bench-postgres: $(WHEEL) $(POSTGRES_PEERS) ## Measure PostgreSQL beside other queues on it.
	@$(BIN)/python -m benchmarks.postgres $(ARGS)

bench-postgres-long: $(WHEEL) ## Measure PostgreSQL with an old transaction, and with ten million waiting.
	@$(BIN)/python -m benchmarks.postgres_long $(ARGS)

bench-postgres-stalls: $(WHEEL) ## Measure how long large operations on PostgreSQL stall others.
	@$(BIN)/python -m benchmarks.postgres_stalls $(ARGS)

bench-bulk: $(WHEEL) ## Measure submissions in bulk on PostgreSQL against COPY.
	@$(BIN)/python -m benchmarks.bulk $(ARGS)

bench-replay: $(WHEEL) ## Measure the replay of a million documents.
	@$(BIN)/python -m benchmarks.replay $(ARGS)

bench-explain: $(WHEEL) ## Measure explanations among 10,000 and 100,000 customers.
	@$(BIN)/python -m benchmarks.explain $(ARGS)

bench-forecast: $(WHEEL) ## Measure how often the expected start was right.
	@$(BIN)/python -m benchmarks.forecast $(ARGS)

bench-http: $(WHEEL) ## Measure the service: submissions, lines, a gigabyte, a thousand event streams.
	@$(BIN)/python -m benchmarks.http $(ARGS)

bench-celery: $(WHEEL) ## Measure Celery with and without stamp, on Valkey and RabbitMQ.
	@$(BIN)/python -m benchmarks.celery $(ARGS)

bench-pages: $(WHEEL) ## Measure each page among 100,000 customers and a million documents.
	@$(BIN)/python -m benchmarks.pages $(ARGS)

screenshots: $(WHEEL) ## Take the pictures of the page in docs/page; it needs Chromium.
	@$(BIN)/python -m tests.screenshots $(ARGS)

fairness: $(WHEEL) ## Print the tables of docs/fairness.md.
	@$(BIN)/python -m benchmarks.fairness $(ARGS)

# Without a network neither the tools nor the advisories can be fetched: it says so and goes on,
# except where FAIRTURN_REQUIRE_SERVICES is set.
audit: $(WHEEL) ## Compare the locked versions with published advisories, if the network allows.
	@if $(MAKE) -s $(AUDIT); then $(BIN)/python -m tests.supply_chain audit; else \
		echo "SKIPPED: the dependencies were not audited: the tools could not be installed"; \
		test -z "$$FAIRTURN_REQUIRE_SERVICES"; fi

sbom: $(WHEEL) $(AUDIT) ## Write the bill of materials of the runtime dependencies into dist/.
	@$(BIN)/python -m tests.supply_chain sbom

# Pip must find every file by its name and hash alone. A line that names a host or a local path would
# tie the file to one machine, so such options are not written, and any address left is an error.
COMPILE = build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --no-emit-find-links --no-annotate --no-header
lock: python-is-new-enough ## Rewrite the requirements files, with the newest versions.
	@echo "Resolving the newest versions for Python 3.11 and newer."
	@"$(PYTHON)" -m venv --clear build/lock
	@build/lock/bin/python -m pip install -q uv==$(UV_VERSION)
	@$(COMPILE) pyproject.toml --extra dev --output-file build/lock/resolved.txt
	@printf 'huey\nlitequeue\npersist-queue\n' | $(COMPILE) - --output-file build/lock/peers.txt
	@printf '%s\n' chancy 'oban ; python_version >= "3.12"' pgmq 'pgqueuer[asyncpg]' procrastinate \
		'saq[postgres]' | $(COMPILE) - --output-file build/lock/postgres_peers.txt
	@printf 'cyclonedx-bom\npip-audit\n' | $(COMPILE) - --output-file build/lock/audit.txt
	@if grep -nE '://|^-| @ ' build/lock/resolved.txt build/lock/peers.txt \
		build/lock/postgres_peers.txt build/lock/audit.txt; then \
		echo "The lines above name a host or a path; nothing was changed."; exit 1; fi
	@{ echo "# The exact versions that 'make' installs: to run, to develop and to build, on Python 3.11"; \
		echo "# and newer. Do not edit this file; change pyproject.toml, then write it anew: make lock"; \
		cat build/lock/resolved.txt; } > build/lock/requirements.txt
	@{ echo "# The queues that 'make bench-embedded' measures. Do not edit this file: make lock"; \
		cat build/lock/peers.txt; } > build/lock/peers-with-title.txt
	@{ echo "# The queues that 'make bench-postgres' measures. Do not edit this file: make lock"; \
		cat build/lock/postgres_peers.txt; } > build/lock/postgres_peers-with-title.txt
	@{ echo "# The tools of 'make audit' and 'make sbom'. Do not edit this file: make lock"; \
		cat build/lock/audit.txt; } > build/lock/audit-with-title.txt
	@mv build/lock/requirements.txt requirements.txt
	@mv build/lock/audit-with-title.txt .ci/audit.txt
	@mv build/lock/peers-with-title.txt benchmarks/peers.txt
	@mv build/lock/postgres_peers-with-title.txt benchmarks/postgres_peers.txt
	@rm -rf build/lock

clean: ## Remove everything that the other targets made.
	@rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find $(CHECKED) -name __pycache__ -prune -exec rm -rf {} +

python-is-new-enough:
	@test -n "$(PYTHON_VERSION)" || { \
		echo "There is no Python at '$(PYTHON)'. Name one: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "fairturn needs Python 3.11 or newer, and '$(PYTHON)' is $(PYTHON_VERSION)." \
			"Name another: make PYTHON=python3.12"; exit 1; }

# The environment starts empty, so that a package that left requirements.txt leaves it too.
$(FILLED): requirements.txt | python-is-new-enough
	@echo "Creating .venv with the packages of requirements.txt. The first time it takes a minute or two."
	@"$(PYTHON)" -m venv --clear .venv
	@$(BIN)/python -m pip install -q --require-hashes -r requirements.txt
	@touch $@

# Other queues, which the benchmark measures and nothing else needs.
$(PEERS): benchmarks/peers.txt | python-is-new-enough
	@echo "Creating build/peers with the packages of benchmarks/peers.txt."
	@"$(PYTHON)" -m venv --clear build/peers
	@build/peers/bin/python -m pip install -q --require-hashes -r benchmarks/peers.txt
	@touch $@

$(POSTGRES_PEERS): benchmarks/postgres_peers.txt | python-is-new-enough
	@echo "Creating build/postgres-peers with the packages of benchmarks/postgres_peers.txt."
	@"$(PEERS_PYTHON)" -m venv --clear build/postgres-peers
	@build/postgres-peers/bin/python -m pip install -q --require-hashes -r benchmarks/postgres_peers.txt
	@touch $@

$(AUDIT): .ci/audit.txt | python-is-new-enough
	@echo "Creating build/audit with the packages of .ci/audit.txt."
	@"$(PYTHON)" -m venv --clear build/audit
	@build/audit/bin/python -m pip install -q --require-hashes -r .ci/audit.txt
	@touch $@

# The stamp carries the time the build began: a file saved during the build is newer, and the next
# make builds again.
$(WHEEL): $(FILLED) $(SOURCES) pyproject.toml README.md LICENSE
	@echo "Building the wheel and installing it into .venv."
	@touch $@.begun
	@rm -rf dist
	@$(BIN)/python -m pip wheel -q --no-index --no-build-isolation --no-deps --wheel-dir dist .
	@$(BIN)/python -m pip install -q --no-index --no-deps --force-reinstall dist/fairturn-*.whl
	@mv $@.begun $@
