# oneDNN as DNNL::dnnl. Version 3 has its own CMake config; that of version 2 in Debian 12 requires
# OpenCL headers, which are not needed here, so there the library is searched for.
include(FindPackageHandleStandardArgs)
if(NOT TARGET DNNL::dnnl)
  find_package(dnnl 3 CONFIG QUIET)
endif()
if(TARGET DNNL::dnnl)
  set(dnnl_FOUND TRUE)
  return()
endif()
find_path(DNNL_INCLUDE oneapi/dnnl/dnnl.hpp)
find_library(DNNL_LIBRARY dnnl)
mark_as_advanced(DNNL_INCLUDE DNNL_LIBRARY)
find_package_handle_standard_args(dnnl REQUIRED_VARS DNNL_LIBRARY DNNL_INCLUDE)
if(dnnl_FOUND)
  add_library(DNNL::dnnl UNKNOWN IMPORTED)
  set_target_properties(DNNL::dnnl PROPERTIES IMPORTED_LOCATION ${DNNL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${DNNL_INCLUDE})
endif()
