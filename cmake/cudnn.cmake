# cuDNN's attention: a plugin, tandem_cudnn.so, that the library opens at first use. If something is
# missing here, a stub replaces its loader, and GPUs run the simple kernels.
set(plugin_folder src/kernels/cuda/cudnn)
set(plugin_source ${plugin_folder}/plugin.cc)
set(cudnn_loader ${plugin_folder}/plugin_loader.cc)
list(REMOVE_ITEM cuda_library_sources ${plugin_source} ${cudnn_loader})

# Each may come from the toolkit, the system, or the Python packages that PyTorch depends on.
execute_process(COMMAND python3 -c "import nvidia; print(*nvidia.__path__, sep=';')"
  OUTPUT_VARIABLE python_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
list(TRANSFORM python_packages APPEND /cudnn OUTPUT_VARIABLE cudnn_packages)
list(TRANSFORM python_packages APPEND /cu13 OUTPUT_VARIABLE cuda_packages)
set(headers HINTS ${CUDAToolkit_INCLUDE_DIRS} PATHS ${cudnn_packages} ${cuda_packages} PATH_SUFFIXES include)
set(libraries HINTS ${CUDAToolkit_LIBRARY_DIR} PATHS ${cudnn_packages} ${cuda_packages} PATH_SUFFIXES lib)
find_path(CUDNN_INCLUDE cudnn_version.h ${headers})
find_library(CUDNN_LIBRARY NAMES cudnn libcudnn.so.9 ${libraries})
find_path(NVRTC_INCLUDE nvrtc.h ${headers})
find_library(NVRTC_LIBRARY NAMES nvrtc libnvrtc.so.13 ${libraries})
find_path(CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
  HINTS ${PROJECT_SOURCE_DIR}/.deps/cudnn_frontend/include)
set(missing "")
foreach(variable CUDNN_INCLUDE CUDNN_LIBRARY NVRTC_INCLUDE NVRTC_LIBRARY CUDNN_FRONTEND_INCLUDE)
  if(NOT ${variable})
    list(APPEND missing ${variable})
  endif()
endforeach()
# The library alone has no caller of attention.
set(has_callers OFF)
if(TANDEM_TRAINING OR TANDEM_TESTS OR TANDEM_BENCH)
  set(has_callers ON)
endif()
list(JOIN missing ", " missing)
if(missing AND has_callers)
  message(NOTICE "cuDNN's attention: not built: not found: ${missing} (run tools/setup_cuda.sh)")
endif()
if(missing OR NOT has_callers)
  set(cudnn_loader ${plugin_folder}/no_cudnn.cc)
  list(APPEND cuda_library_sources ${cudnn_loader})
  set_source_files_properties(${cudnn_loader} PROPERTIES
    COMPILE_DEFINITIONS TANDEM_CUDNN_MISSING="${missing}")
  return()
endif()
list(APPEND cuda_library_sources ${cudnn_loader})

add_library(tandem_cudnn MODULE ${plugin_source})
set_target_properties(tandem_cudnn PROPERTIES PREFIX "" CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
target_include_directories(tandem_cudnn PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_include_directories(tandem_cudnn SYSTEM PRIVATE ${CUDNN_FRONTEND_INCLUDE} ${CUDNN_INCLUDE}
  ${NVRTC_INCLUDE} ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(tandem_cudnn PRIVATE CUDNN_FRONTEND_SKIP_JSON_LIB)
# -O1: graphs are built once, and its headers take long to compile.
target_compile_options(tandem_cudnn PRIVATE $<$<CONFIG:Release>:-O1>)
target_link_libraries(tandem_cudnn PRIVATE tandem_flags ${CUDNN_LIBRARY} ${NVRTC_LIBRARY}
  CUDA::cudart_static)
set(exports ${PROJECT_SOURCE_DIR}/cmake/plugin_exports.map)
target_link_options(tandem_cudnn PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
set_target_properties(tandem_cudnn PROPERTIES LINK_DEPENDS ${exports})
add_dependencies(tandem tandem_cudnn)
set_source_files_properties(${cudnn_loader} PROPERTIES
  COMPILE_DEFINITIONS TANDEM_PLUGIN_DIR="${CMAKE_INSTALL_FULL_LIBDIR}")
if(TANDEM_INSTALL)
  install(TARGETS tandem_cudnn LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
