# make install | demo | serve | test | thorough | fuzz | lint | bench | peers | soak | torture. Everything lives in .venv; PYTHON picks the interpreter.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt

SOURCES := nereid_backend converters native_service tests
# What must hold on both numpy generations.
BOTH_NUMPYS := tests/nereid_backend/test_on_triton.py tests/nereid_backend/test_meta_on_triton.py \
	tests/nereid_backend/test_tensors.py tests/nereid_backend/test_batching.py tests/nereid_backend/test_executor.py \
	tests/nereid_backend/test_hooks_on_triton.py tests/nereid_backend/test_pipeline.py \
	tests/converters/test_bundles_on_triton.py
# Servers under load, whose memory or times are looked at: nothing runs beside them.
ALONE := tests/native_service/test_limits.py tests/native_service/test_soak.py tests/torture/test_torture.py
# Half of a test's time is waiting for servers. The tests of a file share theirs, so they stay together.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: install demo serve test thorough fuzz lint bench peers soak torture clean

install: $(VENV)/.installed

demo: $(VENV)/.demo
	$(BIN)/python tests/demo/run.py

serve: $(VENV)/.demo
	$(BIN)/python tests/demo/run.py --serve

test: $(VENV)/.test $(VENV)-numpy2/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)
	$(VENV)-numpy2/bin/python -m pytest $(SIDE_BY_SIDE) $(BOTH_NUMPYS)

# 10,000 made-up manifests, contracts and specifications each.
thorough: $(VENV)/.test
	$(BIN)/python -m pytest --hypothesis-profile=thorough -k made_up

# 10,000 messages, tensors and connections made up for a running server.
fuzz: $(VENV)/.test
	$(BIN)/python -m pytest --hypothesis-profile=thorough tests/native_service/test_fuzz.py tests/native_service/test_limits.py

BENCHES := $(addprefix bench/,overhead front live_models coalescing hooks engine_call weights second_start memory checkpoint \
	warm_script kserve_ways check encoder linear snooze lifecycle) endings

bench: $(VENV)/.test
	missed=0; for each in $(BENCHES); do $(BIN)/python tests/$$each.py || missed=1; done; exit $$missed

# The same models and requests on other servers; builds environments for them in the cache folder.
peers: $(VENV)/.test
	$(BIN)/python tests/bench/peers.py --write

# Ten minutes of mixed load with deaths of processes; SECONDS_OF_LOAD=300 for less.
SECONDS_OF_LOAD ?= 600

soak: $(VENV)/.test
	$(BIN)/python tests/soak.py --seconds $(SECONDS_OF_LOAD)

# Half an hour: a server of its own for each scenario. SCENARIOS="the_disk_is_full envoy_is_killed" for some, SEED=7 for others.
SCENARIOS ?=
SEED ?= 1

torture: $(VENV)/.test
	$(BIN)/python tests/torture/run.py $(SCENARIOS) --seed $(SEED) $(if $(SCENARIOS),,--table)

clean:
	rm -rf $(VENV) $(VENV)-numpy2 bundles

$(VENV)/.venv $(VENV)-numpy2/.venv:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "nereid needs CPython 3.11 or newer; this is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip  # old resolvers search for minutes
	touch $@

$(VENV)/.installed: pyproject.toml .ci/constraints.txt | $(VENV)/.venv
	$(PIP) --editable '.[jax,onnx,serve]'
	touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(PIP) --editable '.[jax,onnx,serve,demo]'
	touch $@

$(VENV)/.test: pyproject.toml .ci/constraints.txt | $(VENV)/.venv
	$(PIP) --editable '.[jax,torch,onnx,text,xgboost,sklearn,export,serve,demo,dev]'
	touch $(VENV)/.installed $(VENV)/.demo $@

$(VENV)-numpy2/.test: pyproject.toml .ci/constraints-numpy2.txt | $(VENV)-numpy2/.venv
	$(VENV)-numpy2/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint .ci/constraints-numpy2.txt --editable '.[jax,torch,onnx,text,serve,dev]'
	touch $@
