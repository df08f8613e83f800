# `make demo` and `make test` do all the set-up themselves on a fresh machine (Linux, Python >= 3.11).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-all lint types docs sanitize bench compat clean

demo: $(VENV)/.installed ## train the example under the profiler and say where the report is
	$(BIN)/dsprof run --nproc-per-node 2 examples/train_gpt.py

# Files with tests that run alone: to collect all of them takes a quarter of a minute.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

# One more than there are cores: tests wait for processes that sleep, and for each other, for a third of the time.
WORKERS ?= $(shell n=$$(nproc); echo $$(( n < 15 ? n + 1 : 16 )))

# Tests start hundreds of interpreters, which need not compile dsprof each time.
test test-all: export PYTHONDONTWRITEBYTECODE =
# A machine that stands still for half a second fails a test of real processes now and then. What failed runs once more
# with nothing beside it, and fails if it fails again; where nothing was recorded as failed, pytest's own exit status holds.
AGAIN = --last-failed --last-failed-no-failures none --numprocesses 0
test: $(VENV)/.tested ## everything but what takes minutes
	rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest -m "not slow and not alone" \
	  --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 40 \
	  || $(BIN)/python -m pytest -m "not slow and not alone" $(AGAIN)
	rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest -m "not slow and alone" --durations 20 $(ALONE) \
	  || $(BIN)/python -m pytest -m "not slow and alone" $(AGAIN) $(ALONE)

test-all: $(VENV)/.tested
	$(BIN)/python -m pytest

lint: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tested ## strict, over all four folders as users import them
	$(BIN)/mypy -p dsprof

docs: $(VENV)/.tested ## the documentation as a web site in build/docs; a warning is an error
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs build/docs

sanitize: $(VENV)/.tested ## the native helper under AddressSanitizer, its threads under ThreadSanitizer (a few minutes)
	$(BIN)/python -m pytest -q tests/test_native_threads.py
	$(BIN)/python tests/sanitize

bench: $(VENV)/.installed ## the collectors' cost in four jobs (45 minutes; goes on where it stopped)
	$(BIN)/python benchmarks/overhead.py

compat: $(VENV)/.installed ## arming, DDP, FSDP2 and a pipeline under torch 2.11 to 2.15 (gigabytes a cell, removed again; resumes)
	$(BIN)/python benchmarks/compat.py

# torch first and by itself: its CPU build is what the constraint names.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the rest into $(VENV), which takes minutes"
	$(PIP) install --quiet -c constraints.txt torch setuptools wheel
	$(PIP) install --quiet -c constraints.txt --no-build-isolation --editable .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt --no-build-isolation --editable ".[test,docs,frameworks,notebook,perfetto,dask]"
	touch $@

clean:
	rm -rf $(VENV) build dist dsprof.egg-info dsprof-out
