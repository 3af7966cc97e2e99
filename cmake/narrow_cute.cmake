# CUTE declares all of Hopper's 2,112 matrix instructions, and parsing them, once for the host and once
# for the device, was half of a fused kernel's compile time. Copies of the headers that list them,
# with only those that kernels here issue, go in front of the real ones.
set(narrow_dir ${CMAKE_BINARY_DIR}/generated/cute_narrow)
set(script ${PROJECT_SOURCE_DIR}/cmake/narrow_cute.awk)
set(lists cute/arch/mma_sm90.hpp)
foreach(list gmma gmma_ext gmma_sparse gmma_sparse_ext)
  list(APPEND lists cute/arch/mma_sm90_${list}.hpp cute/atom/mma_traits_sm90_${list}.hpp)
endforeach()
find_program(AWK awk REQUIRED)
foreach(header IN LISTS lists)
  get_filename_component(folder ${narrow_dir}/${header} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${script})
  # Written only when newer than its source: an unchanged header must not compile everything again.
  if(${CUTLASS_INCLUDE}/${header} IS_NEWER_THAN ${narrow_dir}/${header} OR
     ${script} IS_NEWER_THAN ${narrow_dir}/${header})
    execute_process(COMMAND ${AWK} -f ${script} ${CUTLASS_INCLUDE}/${header}
      OUTPUT_FILE ${narrow_dir}/${header} COMMAND_ERROR_IS_FATAL ANY)
  endif()
endforeach()
