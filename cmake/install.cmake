# cmake --install: the library, its headers, and the files for find_package(tandem) and pkg-config.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)

install(TARGETS tandem EXPORT tandem)
install(DIRECTORY include/tandem TYPE INCLUDE)
install(FILES ${shipped_tuner} DESTINATION ${CMAKE_INSTALL_DATADIR}/tandem)
install(EXPORT tandem NAMESPACE tandem:: DESTINATION ${package_dir} FILE tandemTargets.cmake)
configure_package_config_file(cmake/tandemConfig.cmake.in tandemConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(tandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandemConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/tandemConfigVersion.cmake DESTINATION ${package_dir})
if(NOT BUILD_SHARED_LIBS)
  install(DIRECTORY cmake/modules DESTINATION ${package_dir})
endif()

# Libraries that pkg-config reports: after a static library also its dependencies, by path.
set(pc_libraries -ltandem)
if(NOT BUILD_SHARED_LIBS)
  list(APPEND pc_libraries $<TARGET_LINKER_FILE:DNNL::dnnl> $<TARGET_LINKER_FILE:xxhash::xxhash>
    $<TARGET_LINKER_FILE:fmt::fmt> ${OpenMP_CXX_LIBRARIES})
  if(TANDEM_TRAINING)
    list(APPEND pc_libraries ${ZLIB_LIBRARIES} ${ZSTD_LIBRARY})
  endif()
  if(TANDEM_MPI)
    list(APPEND pc_libraries ${MPI_CXX_LIBRARIES})
  endif()
  if(TANDEM_CUDA)
    list(APPEND pc_libraries ${NCCL_LIBRARY} $<TARGET_LINKER_FILE:CUDA::cublasLt>
      $<TARGET_LINKER_FILE:CUDA::cudart_static>)
  endif()
endif()
list(JOIN pc_libraries " " pc_libraries)
cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX
  BASE_DIRECTORY ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE pc_prefix)
configure_file(cmake/tandem.pc.in tandem.pc.in @ONLY)
file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/tandem.pc
  INPUT ${CMAKE_CURRENT_BINARY_DIR}/tandem.pc.in)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tandem.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
