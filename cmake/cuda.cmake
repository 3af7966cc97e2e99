# CUDA backend and nccl transport, or the stub that reports that they are missing.
if(NOT TANDEM_CUDA)
  target_sources(tandem_objects PRIVATE src/comm/nccl/no_nccl.cc src/core/no_cuda.cc
    src/codec/no_cuda.cc src/gemm/no_cuda.cc src/kernels/no_cuda.cc src/collectives/no_cuda.cc
    src/overlap/collectives/no_cuda.cc src/overlap/no_cuda.cc src/tune/no_cuda.cc)
  target_sources(tandem_bench PRIVATE src/bench/no_cuda.cc)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES 90a-real)
enable_language(CUDA)
# CMake 3.25 does not know that nvcc 13 supports C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
# ccache does not know CMake's "-isystem=" and would compile every clone's sources anew.
set(CMAKE_INCLUDE_SYSTEM_FLAG_CUDA "-isystem ")
set_target_properties(tandem_objects tandem_bench PROPERTIES CUDA_ARCHITECTURES 90a-real)
find_package(CUDAToolkit 13.0 REQUIRED)
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
find_path(NCCL_INCLUDE nccl_device.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
find_path(CUTLASS_INCLUDE cutlass/cutlass.h
  HINTS ${PROJECT_SOURCE_DIR}/.deps/cutlass/cutlass_library/source/include)
if(NOT CUTLASS_INCLUDE)
  message(FATAL_ERROR "CUTLASS headers: not found: run tools/setup_cuda.sh, or set CUTLASS_INCLUDE")
endif()
include(cmake/narrow_cutlass.cmake)

glob_sources(cuda_sources src/*.cu src/*.cc)
list(FILTER cuda_sources INCLUDE REGEX "[.]cu$|/cuda/|^src/comm/(nccl|one_gpu|device)/")
list(FILTER cuda_sources EXCLUDE REGEX "/no_[a-z]+\\.cc$")
list(REMOVE_ITEM cuda_sources ${gpu_host_sources})
if(NOT TANDEM_TRAINING)
  list(FILTER cuda_sources EXCLUDE REGEX "^src/engine/")
endif()
# Encoded collectives: one source for each kernel and family of formats, as they take long to
# compile.
foreach(op one_shot_sum two_shot_sum pipelined_sum reduce_scatter all_gather)
  foreach(family integers levels floats rotated spiked)
    set(instance ${PROJECT_BINARY_DIR}/generated/encoded/${op}_${family}.cu)
    configure_file(src/collectives/cuda/encoded_instance.cu.in ${instance} @ONLY)
    list(APPEND cuda_sources ${instance})
  endforeach()
endforeach()
set(cuda_bench_sources ${cuda_sources})
list(FILTER cuda_bench_sources INCLUDE REGEX "^src/bench/")
set(cuda_library_sources ${cuda_sources})
list(REMOVE_ITEM cuda_library_sources ${cuda_bench_sources})
include(cmake/cudnn.cmake)
target_sources(tandem_objects PRIVATE ${cuda_library_sources})
target_sources(tandem_bench PRIVATE ${cuda_bench_sources})
foreach(target tandem_objects tandem_bench)
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE}
    ${NARROW_CUTLASS} ${CUTLASS_INCLUDE} ${CUTLASS_INCLUDE}/../tools/util/include)
endforeach()
# Kernels in a folder sm90/ are only for Hopper; all others also run on sm_80 and later.
set(portable_sources ${cuda_sources})
list(FILTER portable_sources INCLUDE REGEX "[.]cu$")
list(FILTER portable_sources EXCLUDE REGEX "^src/.*/sm90/")
set_source_files_properties(${portable_sources} PROPERTIES
  COMPILE_OPTIONS -gencode=arch=compute_80,code=compute_80)
# Kernels that record a timeline of their tiles; the others are compiled without the recording code.
set(TANDEM_DEVICE_TIMELINE "" CACHE STRING
  "Kernels that record a timeline: ALL, or some, e.g. ag_gemm/128x256;gemm_rs/128x256")
# Former names.
foreach(kernel 128x128 f16)
  list(TRANSFORM TANDEM_DEVICE_TIMELINE REPLACE "^gemm_rs/${kernel}$" "gemm_rs/cutlass_${kernel}")
endforeach()
list(TRANSFORM TANDEM_DEVICE_TIMELINE REPLACE "^gemm_rs/adding_" "gemm_rs/")
set(recorded_sources ${cuda_sources})
list(FILTER recorded_sources INCLUDE REGEX "^src/overlap/.*/sm90/")
set(recorded_kernels "")
foreach(file IN LISTS recorded_sources)
  string(REGEX REPLACE ".*/overlap/([^/]*)/cuda/sm90/(fused_)?([^/]*)[.]cu$" "\\1/\\3" kernel ${file})
  list(APPEND recorded_kernels ${kernel})
  if(TANDEM_DEVICE_TIMELINE STREQUAL "ALL" OR kernel IN_LIST TANDEM_DEVICE_TIMELINE)
    set_property(SOURCE ${file} APPEND PROPERTY COMPILE_DEFINITIONS TANDEM_DEVICE_TIMELINE)
  endif()
endforeach()
foreach(kernel IN LISTS TANDEM_DEVICE_TIMELINE)
  if(NOT kernel STREQUAL "ALL" AND NOT kernel IN_LIST recorded_kernels)
    message(FATAL_ERROR "TANDEM_DEVICE_TIMELINE: ${kernel}: expected ALL or some of ${recorded_kernels}")
  endif()
endforeach()
# A shared library links the shared runtime, so that its streams are those of the program.
set(cuda_libraries ${NCCL_LIBRARY} CUDA::cublasLt
  $<IF:$<BOOL:${BUILD_SHARED_LIBS}>,CUDA::cudart,CUDA::cudart_static>)
target_link_libraries(tandem PRIVATE ${cuda_libraries})
target_link_libraries(tandem_private INTERFACE ${cuda_libraries})
# Programs of this build must start on machines without a GPU, and without libraries that they do
# not use.
target_link_options(tandem PUBLIC -Wl,--as-needed)
# A ptxas warning means that the compiler serializes wgmma (C7510), which is several times slower.
# Without the extended shapes, tiles of 160 columns consist of tiny instructions.
foreach(target tandem_objects tandem_bench)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
    --expt-relaxed-constexpr -DNDEBUG -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
    -Xptxas --warning-as-error
    -Werror all-warnings -Xcompiler=-Wall,-Wextra>)
endforeach()
# NVIDIA's cuBLASMp on the same cases: tools/peer_cublasmp.sh fetches it and sets this. Its NCCL is
# newer than ours, so code that uses NCCL's device headers is compiled again.
set(TANDEM_CUBLASMP "" CACHE PATH "Folder with the wheels' nvidia/cublasmp and nvidia/nccl")
if(TANDEM_CUBLASMP)
  set(wheels ${TANDEM_CUBLASMP}/nvidia)
  add_executable(peer_cublasmp bench/peers/cublasmp.cc src/comm/nccl/lsa_pointers.cu)
  target_include_directories(peer_cublasmp PRIVATE src)
  target_include_directories(peer_cublasmp SYSTEM BEFORE PRIVATE ${wheels}/nccl/include
    ${wheels}/cublasmp/cu13/include)
  target_link_libraries(peer_cublasmp PRIVATE tandem_internal ${wheels}/cublasmp/cu13/lib/libcublasmp.so.0
    ${wheels}/nccl/lib/libnccl.so.2 CUDA::cublas)
  target_link_options(peer_cublasmp PRIVATE -Wl,--allow-shlib-undefined)
  set_target_properties(peer_cublasmp PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
endif()
