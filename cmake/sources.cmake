# Sources are globbed by folder, relative to the repository: a clone may lie in any folder. A backend
# that is switched off is its no_*.cc stub.
function(glob_sources variable)
  file(GLOB_RECURSE found RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS ${ARGN})
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

glob_sources(tandem_sources src/*.cc)
list(FILTER tandem_sources EXCLUDE REGEX "^src/(cli|bench)/")
list(FILTER tandem_sources EXCLUDE REGEX "/no_[a-z]+\\.cc$|^src/comm/(mpi|nccl|one_gpu|device)/|/cuda/")
if(NOT TANDEM_TRAINING)
  list(FILTER tandem_sources EXCLUDE REGEX "^src/engine/")
endif()
if(TANDEM_TESTS AND NOT TANDEM_TRAINING)  # every parser: the sanitizers check them, too
  glob_sources(parsers src/engine/model/config*.cc src/engine/model/codec_policy.cc
    src/engine/config/*.cc src/observe/trace.cc)
  list(APPEND tandem_sources ${parsers})
endif()
if(TANDEM_MPI)
  glob_sources(mpi_sources src/comm/mpi/*.cc)
  list(FILTER mpi_sources EXCLUDE REGEX "no_mpi\\.cc$")
else()
  set(mpi_sources src/comm/mpi/no_mpi.cc)
endif()
list(APPEND tandem_sources ${mpi_sources})

# What `tandem bench` times and checks, which is no part of the library.
glob_sources(bench_sources src/bench/*.cc)
list(FILTER bench_sources EXCLUDE REGEX "/no_cuda\\.cc$|/cuda/")
if(TANDEM_TRAINING)
  list(FILTER bench_sources EXCLUDE REGEX "/no_prefill\\.cc$")
else()
  list(FILTER bench_sources EXCLUDE REGEX "/bench_prefill\\.cc$")
endif()

# Readers and writers of JSON and TOML, and the log: half the compile time, and no loop of theirs matters.
set(parsing_sources ${tandem_sources})
list(FILTER parsing_sources INCLUDE REGEX "^src/(observe/|core/(safetensors|log)|tune/tuner\\.|\
engine/(report|config)/|engine/model/config|engine/train/metrics|engine/checkpoint/checkpoint\\.)")
list(REMOVE_ITEM parsing_sources src/observe/recorder.cc)
list(REMOVE_ITEM tandem_sources ${parsing_sources})

# Fused multiply-adds in the kernels' loops: ISO mode turns them off.
glob_sources(kernel_sources src/kernels/cpu/*.cc src/gemm/cpu/*.cc)
set_source_files_properties(${kernel_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=fast)
# None in the wire formats, which are the same to the last bit on every processor. Their vectors are
# wider than some processors' and then passed in memory, of which GCC warns.
glob_sources(codec_sources src/codec/*.cc)
list(FILTER codec_sources EXCLUDE REGEX "/(cpu|cuda)/")
set_source_files_properties(${codec_sources} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-Wno-psabi")
# Without errno, square roots vectorise.
set(optimizer_sources src/engine/optim/adamw.cc)
set_source_files_properties(${optimizer_sources} PROPERTIES COMPILE_OPTIONS -fno-math-errno)
# Sources with options of their own cannot share precompiled headers.
set_source_files_properties(${kernel_sources} ${codec_sources} ${optimizer_sources} PROPERTIES
  SKIP_PRECOMPILE_HEADERS ON)

# Loading the precompiled headers is most of what a small source costs. A folder's sources are a group,
# so that names need to differ in a folder only; sources with options of their own stay alone.
foreach(source IN LISTS tandem_sources parsing_sources bench_sources)
  cmake_path(GET source PARENT_PATH folder)
  string(MAKE_C_IDENTIFIER ${folder} group)
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
endforeach()
