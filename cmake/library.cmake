# Targets: `tandem` (tandem::tandem), static or shared, for users; `tandem_private` for the Python
# package, which uses more than the public headers. Both consist of the same objects.
# `tandem_internal`, for the program, the tests and the benchmarks, adds `tandem_bench`, src/bench.

function(tandem_internal_library name)
  add_library(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include
    ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
  target_compile_features(${name} PRIVATE cxx_std_20)
  target_compile_definitions(${name} PRIVATE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
  target_link_libraries(${name} PRIVATE tandem_flags ${tandem_link_libraries}
    spdlog::spdlog_header_only nlohmann_json::nlohmann_json)
  # Precompiles the headers that are slow to parse and in most sources. nlohmann/json.hpp is not one:
  # its literals are instantiated in every source that has it, which costs more than parsing it in
  # the few that use it.
  foreach(header fmt/format.h algorithm chrono filesystem functional future map memory mutex optional
      span string thread vector)
    target_precompile_headers(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<${header}$<ANGLE-R>>")
  endforeach()
  if(TANDEM_UNITY)
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  endif()
endfunction()

tandem_internal_library(tandem_objects OBJECT ${tandem_sources})
# A separate library: GCC rejects precompiled headers at another optimization level.
tandem_internal_library(tandem_parsing_objects OBJECT ${parsing_sources})
target_compile_options(tandem_parsing_objects PRIVATE $<$<CONFIG:Release>:-O1>)
if(BOOST_BEAST)
  target_include_directories(tandem_parsing_objects SYSTEM PRIVATE ${BOOST_BEAST})
endif()
set(objects $<TARGET_OBJECTS:tandem_objects> $<TARGET_OBJECTS:tandem_parsing_objects>)

add_library(tandem ${objects})
add_library(tandem::tandem ALIAS tandem)
target_include_directories(tandem PUBLIC
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:include>)
target_compile_features(tandem PUBLIC cxx_std_20)  # required by the headers
target_link_libraries(tandem PRIVATE ${tandem_link_libraries})
set_target_properties(tandem PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

add_library(tandem_private INTERFACE)
target_include_directories(tandem_private INTERFACE ${PROJECT_SOURCE_DIR}/src
  ${PROJECT_BINARY_DIR}/generated)
if(BUILD_SHARED_LIBS)
  target_link_libraries(tandem PRIVATE tandem_flags)
  # Instantiations of the standard library's templates are not exported either.
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(tandem PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined)
  set_target_properties(tandem PROPERTIES LINK_DEPENDS ${exports})
  add_library(tandem_archive STATIC EXCLUDE_FROM_ALL ${objects})
  set_target_properties(tandem_archive PROPERTIES LINKER_LANGUAGE CXX)
  target_include_directories(tandem_archive INTERFACE ${PROJECT_SOURCE_DIR}/include)
  target_link_libraries(tandem_archive PRIVATE ${tandem_link_libraries})
  set(archive tandem_archive)
else()
  set(archive tandem)
endif()
tandem_internal_library(tandem_bench STATIC EXCLUDE_FROM_ALL ${bench_sources})
target_link_libraries(tandem_bench PRIVATE ${archive})
target_link_libraries(tandem_private INTERFACE ${archive})
add_library(tandem_internal INTERFACE)
target_link_libraries(tandem_internal INTERFACE tandem_bench tandem_private)
