# `make run` and `make test` are the whole set-up. CUDA=1 adds the GPU backend; it is the default if
# nvcc and a GPU are found.
CUDA ?= $(shell command -v nvcc >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo 1 || echo 0)
JOBS ?= $(shell nproc)
PRESET = $(if $(filter 1,$(CUDA)),cuda,cpu)
BUILD = $(if $(filter 1,$(CUDA)),build-cuda,build)
# Four at once, or two that need two processors: many wait for deadlines. The tests' tuner times are
# stored with the build.
CTEST = TANDEM_CACHE_DIR=$(CURDIR)/$(BUILD)/tests/cache ctest --test-dir $(BUILD) --output-on-failure -j 4

.PHONY: all run test test-more test-long test-torch test-gpu bench bench-gpu timeline-gpu asan tsan lint tables docs wheel wheel-check release fmt clean

all:
	@tools/setup.sh build
	@$(MAKE) --no-print-directory build-only CMAKE_FLAGS="-DTANDEM_TESTS=OFF -DTANDEM_BENCH=OFF"

.PHONY: build-only
build-only:
	@if [ "$(CUDA)" = 1 ]; then tools/setup_cuda.sh; fi
	@cmake --preset $(PRESET) -DTANDEM_UNITY=ON $(CMAKE_FLAGS) --log-level=WARNING >/dev/null
	@cmake --build $(BUILD) -j $(JOBS) $(if $(TARGETS),--target $(TARGETS))
	@if [ "$(BUILD)" != build ]; then mkdir -p build/bin && ln -sf ../../$(BUILD)/bin/tandem build/bin/tandem; fi

run: all
	@tools/demo.sh $(BUILD)/bin/tandem out

# Off if nanobind is not available.
PYTHON = $(if $(wildcard .deps/nanobind/nanobind/cmake/nanobind-config.cmake),ON,OFF)

# Names of tests that `make test` leaves to `make test-more`.
MORE = $(shell grep -v '^\#' tests/more.txt | grep . | paste -sd'|')

test:
	@tools/setup.sh test
	@tools/setup_python.sh
	@$(MAKE) --no-print-directory test-only

.PHONY: test-build test-only
test-build:
	@$(MAKE) --no-print-directory build-only \
		CMAKE_FLAGS="-DTANDEM_TESTS=ON -DTANDEM_BENCH=ON -DTANDEM_PYTHON=$(PYTHON)"

# `make test` without its set-up. Prints the build and test time, and the load meanwhile.
test-only:
	@mkdir -p $(BUILD) && date +%s >$(BUILD)/test-begin
	@$(MAKE) --no-print-directory test-build
	@built=$$(date +%s); $(CTEST) -LE 'gpu|long' -E '$(MORE)'; status=$$?; \
		echo "Built in $$((built - $$(cat $(BUILD)/test-begin))) s, tested in $$(($$(date +%s) - built)) s;" \
			"load $$(cut -d' ' -f1-3 /proc/loadavg) on $$(nproc) processors"; exit $$status

# Launchers, faults, pages and long jobs of commands: .ci/run runs them, too.
test-more:
	@tools/setup.sh test
	@tools/setup_python.sh
	@$(MAKE) --no-print-directory test-build
	@$(CTEST) -LE 'gpu|long' -R '$(MORE)'

# Larger sizes, more ranks and more seeds.
test-long:
	@tools/setup.sh test
	@tools/setup_python.sh
	@$(MAKE) --no-print-directory test-build
	@$(CTEST) -L long

# Tests of tandem.torch.enable(), the torch.distributed backend and frameworks, with a fetched PyTorch.
test-torch:
	@tools/setup.sh test
	@tools/setup_python.sh
	@tools/setup_torch.sh
	@$(MAKE) --no-print-directory test-build TARGETS=_core
	@$(CTEST) -L torch

# The Python on the PATH if its PyTorch has CUDA: its tests run, too.
GPU_PYTHON = $(shell python3 -c "import sys, torch; torch.version.cuda and \
	print('-DPython_EXECUTABLE=' + sys.executable)" 2>/dev/null)

test-gpu:
	@tools/setup.sh test
	@tools/setup_python.sh
	@$(MAKE) --no-print-directory build-only CUDA=1 \
		CMAKE_FLAGS="-DTANDEM_TESTS=ON -DTANDEM_PYTHON=$(PYTHON) $(GPU_PYTHON)"
	@ctest --test-dir build-cuda --output-on-failure -j 1 -L gpu

bench:
	@tools/setup.sh test
	@$(MAKE) --no-print-directory build-only CMAKE_FLAGS="-DTANDEM_TESTS=OFF -DTANDEM_BENCH=ON"
	@tools/bench.sh $(BUILD)/bin out/bench

bench-gpu:
	@tools/setup.sh test
	@$(MAKE) --no-print-directory build-only CUDA=1 CMAKE_FLAGS="-DTANDEM_TESTS=OFF"
	@GPU_TESTS=0 tools/gpu_check.sh build-cuda/bin out/bench-gpu

# Records one call of each fused operator tile by tile (docs/dev/benchmarking.md), in a separate build.
timeline-gpu:
	@tools/setup.sh build
	@tools/setup_cuda.sh
	@cmake --preset cuda -B build-timeline -DTANDEM_TESTS=OFF -DTANDEM_BENCH=OFF --log-level=WARNING \
		"-DTANDEM_DEVICE_TIMELINE=ag_gemm/128x256;gemm_rs/128x256" >/dev/null
	@cmake --build build-timeline -j $(JOBS) --target tandem_cli
	@tools/gpu_timeline.sh build-timeline/bin out/timeline

# Sanitizers on the communicator and operator tests.
asan tsan:
	@tools/setup.sh test
	@cmake --preset $@ -DTANDEM_UNITY=ON --log-level=WARNING >/dev/null
	@cmake --build build-$@ -j $(JOBS) --target sanitized_tests
	@TSAN_OPTIONS=suppressions=$(CURDIR)/tools/tsan.supp ctest --test-dir build-$@ --output-on-failure -j 4 -L sanitized

lint:
	@tools/lint.sh

# Tables and pictures of README.md and docs/, from bench/results.
tables:
	@python3 -B tools/tables.py

# The site of docs/, in build/site.
docs:
	@tools/site.sh

# dist/tandem-*.whl for CPU ranks, even if CUDA is 1 because a GPU was found; make wheel CUDA=1:
# dist/cuda/tandem-*.whl with GPU ranks.
WHEEL_CUDA = $(and $(filter 1,$(CUDA)),$(filter command environment,$(origin CUDA)),1)
wheel:
	@tools/setup.sh test
	@$(if $(WHEEL_CUDA),tools/setup_cuda.sh)
	@CUDA=$(WHEEL_CUDA) tools/wheel.sh

# Tests each wheel of dist/ in an empty virtual environment; make wheel-check CUDA=1: of dist/cuda/.
wheel-check:
	@CUDA=$(WHEEL_CUDA) tools/wheel_check.sh

# dist/: wheels, tandem-VERSION-linux-ARCH.tar.gz and SHA256SUMS.
release:
	@tools/setup.sh
	@tools/release.sh

fmt:
	@git ls-files '*.h' '*.cc' '*.cu' '*.cuh' | xargs -r clang-format -i

clean:
	rm -rf build build-cuda build-timeline build-asan build-tsan build-python build-wheel*
