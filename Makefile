# gristmill's front door; works with GNU make 3.81 (macOS) and later. `make` alone lists the targets.
#   PYTHON  the Python (3.11 or newer) that makes .venv        make env PYTHON=python3.12
#   DEVICE  auto, cpu or gpu: which build of torch             make env DEVICE=gpu
#   CORES   how many cores the demo may use                    make demo CORES=4
#   WORKERS how many files of tests run side by side           make test WORKERS=8
#   PYTEST  more arguments for pytest                          make test PYTEST='-m "not slow"'

PYTHON ?= python3
DEVICE ?= auto
CORES ?= all
WORKERS ?= 2
PYTEST ?=

# Recipes use paths relative to this folder, so that its own path may contain spaces.
BIN := .venv/bin
# Of tests side by side each takes one thread: more than there are cores wait for one another, and take twice the time.
THREADS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}
SETUP := $(PYTHON) scripts/setup_env.py --device $(DEVICE)

.DEFAULT_GOAL := help
.PHONY: help env env-dev demo watch test test-slurm lint schema clean

help: ## list the targets
	@echo "usage: make TARGET"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-10s %s\n", $$1, $$2 }'

env: ## make .venv: torch for the CPU or the GPU that is here, the locked packages, the demo model
	@$(SETUP)

env-dev: ## the same, with the tools of `make test`
	@$(SETUP) --dev

demo: env ## run the demo end to end; a second run finds nothing to do
	$(BIN)/snakemake --cores $(CORES)
	@echo "report: $(CURDIR)/results/report.html"

watch: ## what a run in this folder is doing; q leaves, the run goes on
	@$(BIN)/python scripts/watch.py

lint: env-dev ## formatting, types and workflow style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy --strict
	$(BIN)/snakemake --lint

test: lint ## lint, then pytest, all but the tests that need a SLURM
	$(THREADS) $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --ignore=tests/slurm $(PYTEST)

test-slurm: env-dev ## pytest on a real SLURM on this machine (root, Debian), which is installed if it is missing
	$(BIN)/python tests/slurm/cluster.py install
	$(THREADS) $(BIN)/pytest tests/slurm $(PYTEST)

schema: env ## write config/config.schema.json from the typed config
	$(BIN)/python scripts/schema.py

clean: ## remove results/ and .snakemake/ (.venv stays)
	rm -rf results .snakemake
