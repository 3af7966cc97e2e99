# build/generated/core/version.h: the project's version and the commit that was configured.
execute_process(COMMAND git -C ${PROJECT_SOURCE_DIR} describe --always --dirty --abbrev=12
  OUTPUT_VARIABLE TANDEM_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT TANDEM_COMMIT)
  set(TANDEM_COMMIT unknown)
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in
  ${CMAKE_BINARY_DIR}/generated/core/version.h @ONLY)
target_include_directories(tandem PUBLIC ${CMAKE_BINARY_DIR}/generated)
