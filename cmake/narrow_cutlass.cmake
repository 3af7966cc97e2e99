# CUTLASS's headers cover all architectures, and Hopper's 2,112 matrix instructions. Parsing them,
# once for the host and twice for the device, was most of a fused kernel's compile time. Copies of
# the headers that include them, reduced to what our kernels use, precede the real ones.
set(NARROW_CUTLASS ${PROJECT_BINARY_DIR}/generated/narrow_cutlass)

# Writes the copy only if its text changes, so that configuring again recompiles nothing.
function(write_narrow header text)
  file(CONFIGURE OUTPUT ${NARROW_CUTLASS}/${header} CONTENT "${text}" @ONLY)
endfunction()

# narrow_includes(HEADER REGEX): removes the includes whose names match.
function(narrow_includes header unused)
  file(READ ${CUTLASS_INCLUDE}/${header} text)
  get_filename_component(folder ${header} DIRECTORY)
  string(REGEX REPLACE "#include [<\"][^\n]*(${unused})[^\n]*" "" text "${text}")
  string(REGEX REPLACE "#include \"((builders/)?[a-z0-9_]+[.])" "#include \"${folder}/\\1" text
    "${text}")
  write_narrow(${header} "${text}")
endfunction()

set(other "sm[78]0_|sm1[0-9][0-9]_|sparse|array_(tma|multi)|mixed_input|fp8|multistage|_rs_|broadcast")
narrow_includes(cutlass/gemm/collective/collective_builder.hpp "${other}")
narrow_includes(cutlass/gemm/collective/collective_mma.hpp "${other}")
narrow_includes(cutlass/gemm/kernel/gemm_universal.hpp "${other}")
narrow_includes(cutlass/epilogue/collective/collective_builder.hpp "${other}")
narrow_includes(cutlass/epilogue/collective/collective_epilogue.hpp "${other}")

find_program(AWK awk REQUIRED)
set(script ${PROJECT_SOURCE_DIR}/cmake/narrow_instructions.awk)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${script})
foreach(header arch/mma_sm90 arch/mma_sm90_gmma arch/mma_sm90_gmma_ext arch/mma_sm90_gmma_sparse
    arch/mma_sm90_gmma_sparse_ext atom/mma_traits_sm90_gmma atom/mma_traits_sm90_gmma_ext
    atom/mma_traits_sm90_gmma_sparse atom/mma_traits_sm90_gmma_sparse_ext)
  execute_process(COMMAND ${AWK} -f ${script} ${CUTLASS_INCLUDE}/cute/${header}.hpp
    OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  write_narrow(cute/${header}.hpp "${text}")
endforeach()
