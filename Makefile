# The environment of all targets is .venv; it is made with the first suitable Python on PATH, or with `make PYTHON=…`.
# COUCHDB_URL, if set, reaches the programs through the environment only: a password has no place on a command line.

PYTHONS = $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10)
VENV = .venv
RUN = $(VENV)/bin/python

# The tests wait for half of their time: six processes use two cores well. To use a debugger: TEST_JOBS=
TEST_JOBS = -n 6 --dist worksteal

# What PYTEST_ARGS name is run; without them `make test` leaves out the tests that are marked as slow.
PYTEST = $(RUN) -m pytest $(TEST_JOBS)

# Each of these examples is a program whose module is called `shop`: their types are checked one folder after the other.
SHOPS = $(patsubst examples/%/,%,$(filter-out examples/demo/ examples/managed/ examples/__pycache__/,$(wildcard examples/*/)))

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_USER = 0
unexport PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL = help
.NOTPARALLEL:
.PHONY: help demo demo-managed test test-all versions model lint docs pictures bench ablation chaos clean

demo: $(VENV)/installed  ## See real workers at work, on $COUCHDB_URL or else on an embedded server
	@$(RUN) -m examples.demo

demo-managed: $(VENV)/installed  ## See workers behind the limits of a managed service, on $COUCHDB_URL or else an embedded server
	@$(RUN) -m examples.managed

test: $(VENV)/installed-dev  ## Run the tests, on $COUCHDB_URL or else on an embedded server; PYTEST_ARGS="-k lease -x"
	@$(PYTEST) $(or $(PYTEST_ARGS),-m 'not slow')

# Coverage has a floor, `fail_under` in pyproject.toml. The slow tests would take twice as long if it were measured.
test-all: $(VENV)/installed-dev  ## Run all tests, also the slow ones, and measure the coverage of the others
	@$(RUN) -m coverage erase
	@$(RUN) -m coverage run -m pytest $(TEST_JOBS) -m 'not slow'
	@$(PYTEST) -m slow
	@$(RUN) -m coverage combine -q && printf 'Coverage in percent: ' && $(RUN) -m coverage report --format=total

versions: $(VENV)/installed-dev  ## Run tests with other Pythons, if they are there, and other Celerys; TOX_ARGS="-e oldest -- -x"
	@$(RUN) -m tox run $(TOX_ARGS)

model: $(VENV)/installed-dev  ## Explore the protocol of claims and leases for longer: twenty times as many runs, and faults put in
	@MODEL_EXAMPLES=20 $(RUN) -m pytest tests/model $(PYTEST_ARGS)

lint: $(VENV)/installed-dev  ## Check style and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@for folder in $(SHOPS); do \
		MYPYPATH=examples/$$folder $(RUN) -m mypy --explicit-package-bases examples/$$folder || exit 1; \
	done

docs: $(VENV)/installed-docs  ## Build the documentation into build/docs; a warning is an error
	@$(RUN) -m sphinx -q -E -n -W --keep-going docs build/docs
	@echo 'Open file://$(CURDIR)/build/docs/index.html in a browser. The pages and their search need no server.'

pictures: $(VENV)/installed-dev  ## Make pictures of the operators' page into docs/pictures/, on $COUCHDB_URL or else an embedded server
	@$(RUN) -m tests.pictures

bench: $(VENV)/installed-bench  ## Measure beside other brokers, on $COUCHDB_URL, into docs/development/; BENCH_ARGS="--quick"
	@$(RUN) -m tests.benchmarks $(BENCH_ARGS)

ablation: $(VENV)/installed-bench  ## Measure what each adaptive mechanism gains, on $COUCHDB_URL; ABLATION_ARGS="--rounds 1"
	@$(RUN) -m tests.benchmarks.ablation $(ABLATION_ARGS)

chaos: $(VENV)/installed-dev  ## Prove the promises while things fail, on $COUCHDB_URL or else on an embedded server; CHAOS_ARGS="--seed 1"
	@$(RUN) -m tests.chaos $(CHAOS_ARGS)

clean:  ## Remove the environment and all that was built
	@echo 'Removing $(VENV), caches and builds'
	@rm -rf $(VENV) build dist *.egg-info .cache .tox .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## Show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

# If the Python that the environment was made with is gone, so is all that was installed.
$(shell $(RUN) -c '' 2>/dev/null || rm -f $(VENV)/installed*)

$(VENV)/installed: setup.cfg pyproject.toml
	$(call install,.)

$(VENV)/installed-dev: setup.cfg pyproject.toml
	$(call install,.[dev])
	@touch $(VENV)/installed

$(VENV)/installed-docs: setup.cfg pyproject.toml
	$(call install,.[docs])
	@touch $(VENV)/installed

$(VENV)/installed-bench: setup.cfg pyproject.toml
	$(call install,.[bench])
	@touch $(VENV)/installed

# $(VENV)/unfinished is there while something is installed: what was interrupted is made anew from the start.
define install
@if [ -e $(VENV)/unfinished ] || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	for python in $(PYTHONS); do \
		if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then break; fi; \
		python=; \
	done; \
	if [ -z "$$python" ]; then \
		echo 'Python 3.10 or later with its venv module is needed (on Debian and Ubuntu: python3 and python3-venv).' >&2; \
		exit 1; \
	fi; \
	echo "Making the environment $(VENV) with `$$python --version`"; \
	rm -rf $(VENV) && mkdir $(VENV) && touch $(VENV)/unfinished && $$python -m venv $(VENV) || exit 1; \
fi
@echo 'Installing celery-couchdb and what it needs into $(VENV), which may take a minute'
@touch $(VENV)/unfinished
@$(RUN) -m pip install --quiet --editable '$(1)'
@rm $(VENV)/unfinished
@touch $@
endef
