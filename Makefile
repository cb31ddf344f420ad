# On a fresh Debian or Ubuntu machine each of these installs what it needs first.
.PHONY: demo test lint bench soak install generate

PYTHON := .venv/bin/python

# The main job on a real project, printing what happens.
demo: install
	$(PYTHON) -m tests.demo

# The checks, then the tests as root, several at a time: most of them wait for disks and processes.
test: lint
	.ci/as-root $(PYTHON) -m pytest -n 4

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports
	$(PYTHON) proto/generate.py --check

bench: install
	$(PYTHON) -m tests.bench

# Random runs until something is wrong or the minutes are over, each of the seven: operations against a plain directory and
# against a plain model, sixteen clients at once, restores that somebody would lead out of their root, crashes between
# boundary and seal, crashes in rewinds, restores, undos and forks, and loss of power with one filesystem and with two.
# Before the last three, daemons that are wrong, which have to be found out.
MINUTES := 10
soak: install
	.ci/as-root $(PYTHON) -m tests.soak.state_machine --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.crowd --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.escape --tries 1000000 --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.crashes --runs 1000000 --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.joint --control
	.ci/as-root $(PYTHON) -m tests.soak.joint --runs 1000000 --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.power --control sync
	.ci/as-root $(PYTHON) -m tests.soak.power --control trust
	.ci/as-root $(PYTHON) -m tests.soak.power --cuts 1000000 --minutes $(MINUTES)
	.ci/as-root $(PYTHON) -m tests.soak.power --cuts 1000000 --minutes $(MINUTES) --two

install:
	@.ci/install

# The code of the API from the .proto files, and docs/cli.md from the command line itself.
generate: install
	$(PYTHON) proto/generate.py
	$(PYTHON) -m cogfs.ctl.reference docs/cli.md
