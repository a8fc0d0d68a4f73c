# Every target sets up .venv on first use, and again only when pyproject.toml or constraints.txt change.
#
#   PYTHON=python3.12 make test          use this interpreter for .venv (any 3.11 or newer)
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
#                                        take PyTorch's smaller CPU-only build

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test parity bench lint docs test-gpu clean

help:  ## this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

train: $(INSTALLED)  ## train the demo model on four local processes (minutes)
	@$(BIN)/fivefold train moe_demo --parallel fsdp2-tp2 $(ARGS)

test: $(INSTALLED)  ## run the tests
	@$(BIN)/python -m pytest $(ARGS)

parity: $(INSTALLED)  ## prove every layout of the full grid equal to one rank
	@$(BIN)/python -m tests.parity.full $(ARGS)

bench: $(INSTALLED)  ## measure side by side with PyTorch's own parts
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(INSTALLED)  ## ruff and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

docs: $(INSTALLED)  ## build the documentation into docs/_build/html
	@$(BIN)/python -m sphinx -E -a -b html -W --keep-going -n -q docs docs/_build/html
	@$(BIN)/python docs/check_pages.py docs/_build/html

test-gpu: $(INSTALLED)  ## check and measure on one GPU
	@$(BIN)/python -m tests.gpu $(ARGS)

clean:  ## remove what was built (.venv and runs/ stay)
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find docs/api -type f ! -name index.md -delete
	find fivefold tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@set -e; \
	python=""; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
		if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then echo "Fivefold needs Python 3.11 or newer. Set PYTHON to one, as in: PYTHON=python3.12 make"; exit 1; fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		echo "Creating $(VENV) with $$($$python --version) ..."; $$python -m venv --clear $(VENV); \
	fi; \
	echo "Installing Fivefold and its tools into $(VENV) (a minute or two, once) ..."; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'; \
	touch $@; \
	echo "Ready."
