# The commands of this project; CI calls these and nothing else. Each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_STAMP := $(VENV)/.peers
# Which tests: see CONTRIBUTING.md for those that need root.
MARKERS ?= not gpu and not soak

.PHONY: setup train test lint bench soak gpu-check docs

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "paceline needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $(STAMP)

# Side-by-side programs that need other systems install them too.
$(PEERS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test,peers]'
	touch $(PEERS_STAMP)

train: $(STAMP)
	$(BIN)/paceline train examples/tiny.toml checkpoint.resume=never

test: $(STAMP)
	$(BIN)/python -m pytest -m '$(MARKERS)'

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(PEERS_STAMP)
	$(BIN)/python -m benchmarks.run

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak

gpu-check: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_check

docs: $(STAMP)
	$(BIN)/python -m paceline.job.reference docs/guide
	$(BIN)/python -m paceline.doctor.reference docs/guide/doctor.md
	$(BIN)/python -m tests.doctor.table docs/guide/doctor.md
