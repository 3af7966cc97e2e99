# Sources are globbed per layer. A backend that is switched off is its no_*.cc stub.
set(src ${PROJECT_SOURCE_DIR}/src)
file(GLOB_RECURSE tandem_sources CONFIGURE_DEPENDS ${src}/*.cc)
list(FILTER tandem_sources EXCLUDE REGEX "/src/(cli|bench)/")
list(FILTER tandem_sources EXCLUDE REGEX "/no_[a-z]+\\.cc$|/src/comm/(mpi|nccl|one_gpu|device)/|/cuda/")
if(NOT TANDEM_TRAINING)
  list(FILTER tandem_sources EXCLUDE REGEX
    "/src/(model|infer|train)/|/src/observe/(report|progress|trace_reader)")
endif()
if(TANDEM_TESTS AND NOT TANDEM_TRAINING)  # every parser: the sanitizers check them, too
  file(GLOB parsers CONFIGURE_DEPENDS ${src}/model/config*.cc ${src}/model/codec_policy.cc
    ${src}/train/config*.cc)
  list(APPEND tandem_sources ${parsers})
endif()
if(TANDEM_MPI)
  file(GLOB mpi_sources CONFIGURE_DEPENDS ${src}/comm/mpi/*.cc)
  list(FILTER mpi_sources EXCLUDE REGEX "no_mpi\\.cc$")
else()
  set(mpi_sources ${src}/comm/mpi/no_mpi.cc)
endif()
list(APPEND tandem_sources ${mpi_sources})

# What `tandem bench` times and checks, which is no part of the library.
file(GLOB bench_sources CONFIGURE_DEPENDS ${src}/bench/*.cc)
list(FILTER bench_sources EXCLUDE REGEX "/no_cuda\\.cc$")
if(TANDEM_TRAINING)
  list(FILTER bench_sources EXCLUDE REGEX "/no_prefill\\.cc$")
else()
  list(FILTER bench_sources EXCLUDE REGEX "/bench_prefill\\.cc$")
endif()

# Readers and writers of JSON and TOML, and the log: half the compile time, and no loop of theirs matters.
set(parsing_sources ${tandem_sources})
list(FILTER parsing_sources INCLUDE REGEX "/src/(observe/|core/(safetensors|log)|model/config|\
train/(config|metrics|checkpoint\\.)|tune/tuner\\.)")
list(REMOVE_ITEM parsing_sources ${src}/observe/recorder.cc)
list(REMOVE_ITEM tandem_sources ${parsing_sources})

# Fused multiply-adds in the kernels' loops: ISO mode turns them off.
file(GLOB kernel_sources CONFIGURE_DEPENDS ${src}/kernels/cpu/*.cc ${src}/gemm/cpu/*.cc)
set_source_files_properties(${kernel_sources} PROPERTIES COMPILE_OPTIONS -ffp-contract=fast)
# None in the wire formats, which are the same to the last bit on every processor. Their vectors are
# wider than some processors' and then passed in memory, of which GCC warns.
file(GLOB codec_sources CONFIGURE_DEPENDS ${src}/codec/*.cc)
set_source_files_properties(${codec_sources} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-Wno-psabi")
# Without errno, square roots vectorise.
set_source_files_properties(${src}/train/adamw.cc PROPERTIES COMPILE_OPTIONS -fno-math-errno)
# Sources with options of their own cannot share precompiled headers.
set_source_files_properties(${kernel_sources} ${codec_sources} ${src}/train/adamw.cc PROPERTIES
  SKIP_PRECOMPILE_HEADERS ON)

# Loading the precompiled headers is most of what a small source costs. A folder's sources are a group,
# so that names need to differ in a folder only; sources with options of their own stay alone.
foreach(source IN LISTS tandem_sources parsing_sources bench_sources)
  cmake_path(GET source PARENT_PATH folder)
  cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${src})
  string(MAKE_C_IDENTIFIER ${folder} group)
  set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
endforeach()
