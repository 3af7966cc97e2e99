# Sources are globbed by folder, relative to the repository: a clone may be in any folder. A
# disabled backend is replaced by its no_*.cc stub.
function(glob_sources variable)
  file(GLOB_RECURSE found RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${ARGN})
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

glob_sources(tandem_sources src/*.cc)
list(FILTER tandem_sources EXCLUDE REGEX "^src/(cli|bench)/")
list(FILTER tandem_sources EXCLUDE REGEX "/no_[a-z_]+\\.cc$|^src/comm/(mpi|nccl|one_gpu|device)/|/cuda/")
# Decisions of GPU ranks that need no CUDA: in every build, as their tests are.
set(gpu_host_sources src/comm/device/adopted_nccl.cc src/comm/device/error_record.cc
  src/comm/device/gpu_environment.cc src/comm/device/gpu_coordinates.cc)
list(APPEND tandem_sources ${gpu_host_sources})
if(NOT TANDEM_TRAINING)
  list(FILTER tandem_sources EXCLUDE REGEX "^src/(engine|fit)/")
else()
  # HTTP servers need Boost's headers: units of their own, without the precompiled ones.
  glob_sources(http_sources src/engine/serve/http/*.cc)
  list(FILTER http_sources EXCLUDE REGEX "/listen_address[.]cc$")
  find_path(BOOST_BEAST boost/beast.hpp DOC "Boost.Beast (Debian: libboost1.81-dev)")
  if(BOOST_BEAST)
    set_source_files_properties(${http_sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
      SKIP_PRECOMPILE_HEADERS ON)
  else()
    message(STATUS "Without Boost.Beast (libboost1.81-dev): no live page, no serving")
    list(REMOVE_ITEM tandem_sources ${http_sources})
    list(APPEND tandem_sources src/engine/serve/no_http_servers.cc)
  endif()
endif()
# What parses jobs and models: all of the engine that fuzzing with clang compiles.
glob_sources(engine_parsers src/engine/model/config*.cc src/engine/model/codec_policy.cc
  src/engine/model/layout.cc src/engine/model/parameter*.cc src/engine/model/weight_quantization.cc
  src/engine/config/*.cc src/engine/checkpoint/config.cc src/engine/data/config.cc
  src/engine/optim/config.cc src/engine/parallel/config.cc src/engine/train/config.cc)
if(TANDEM_TESTS AND NOT TANDEM_TRAINING)  # every parser and `tandem fit`, for the sanitizers
  glob_sources(parsers src/engine/model/program/*.cc src/engine/model/placement.cc
    src/engine/model/rotary.cc src/engine/model/weights.cc src/observe/trace.cc src/fit/*.cc)
  list(APPEND tandem_sources ${engine_parsers} ${parsers})
endif()
if(TANDEM_MPI)
  glob_sources(mpi_sources src/comm/mpi/*.cc)
  list(FILTER mpi_sources EXCLUDE REGEX "no_mpi\\.cc$")
else()
  set(mpi_sources src/comm/mpi/no_mpi.cc)
endif()
list(APPEND tandem_sources ${mpi_sources})

# Code that `tandem bench` times and checks, not part of the library.
glob_sources(bench_sources src/bench/*.cc)
list(FILTER bench_sources EXCLUDE REGEX "/no_cuda\\.cc$|/cuda/")
if(TANDEM_TRAINING)
  list(FILTER bench_sources EXCLUDE REGEX "/no_prefill\\.cc$")
else()
  list(FILTER bench_sources EXCLUDE REGEX "^src/bench/engine/")
endif()

# JSON and TOML readers and writers, the log, launching and HTTP: half the compile time, and not
# performance critical.
set(parsing_sources ${tandem_sources})
list(FILTER parsing_sources INCLUDE REGEX "^src/(observe/|core/(formats/safetensors_(header|writer)|system/log)|tune/tuner\\.|\
engine/(report|config|launch|serve/http)/|engine/[a-z]+/config|engine/data/ledger/ledger_lines|\
engine/train/records/metrics|engine/checkpoint/checkpoint\\.)")
list(REMOVE_ITEM parsing_sources src/observe/recorder.cc)
list(REMOVE_ITEM tandem_sources ${parsing_sources})

# Fused multiply-adds in the kernels' loops only (see tandem_flags).
glob_sources(kernel_sources src/kernels/cpu/*.cc src/gemm/cpu/*.cc)
set_source_files_properties(${kernel_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=fast)
# The vectors of wire formats are wider than those of some processors and then passed in memory,
# which GCC warns about.
glob_sources(codec_sources src/codec/*.cc)
list(FILTER codec_sources EXCLUDE REGEX "/(cpu|cuda)/")
set_source_files_properties(${codec_sources} PROPERTIES COMPILE_OPTIONS -Wno-psabi)
# Without errno, square roots vectorize.
set_source_files_properties(src/kernels/optimizer.cc PROPERTIES
  COMPILE_OPTIONS "-ffp-contract=fast;-fno-math-errno")
set_source_files_properties(src/core/random.cc PROPERTIES COMPILE_OPTIONS -fno-math-errno)
# Sources with their own options cannot share precompiled headers.
set_source_files_properties(${kernel_sources} ${codec_sources} src/kernels/optimizer.cc
  src/core/random.cc PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

# CLI11's headers.
set_source_files_properties(src/bench/bench_options.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

# Loading the precompiled headers dominates the cost of a small source. The sources of a folder form
# a group, so that names must be unique only within a folder; sources with their own options are
# compiled separately.
foreach(source IN LISTS tandem_sources parsing_sources bench_sources)
  cmake_path(GET source PARENT_PATH folder)
  string(MAKE_C_IDENTIFIER ${folder} group)
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
endforeach()
