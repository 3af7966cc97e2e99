// GEMM primitive descriptors for oneDNN 2 and for 3, which removed operation descriptors.
#pragma once

#include <oneapi/dnnl/dnnl.hpp>

namespace tandem::cpu {

using MemoryDesc = dnnl::memory::desc;

/// out = a x b (+ bias, unless null).
inline dnnl::matmul::primitive_desc matmul_plan(const dnnl::engine& engine, const MemoryDesc& a,
                                                const MemoryDesc& b, const MemoryDesc* bias,
                                                const MemoryDesc& out,
                                                const dnnl::primitive_attr& attributes) {
#if DNNL_VERSION_MAJOR >= 3
  if (bias) return {engine, a, b, *bias, out, attributes};
  return {engine, a, b, out, attributes};
#else
  using Operation = dnnl::matmul::desc;
  return {bias ? Operation(a, b, *bias, out) : Operation(a, b, out), attributes, engine};
#endif
}

}  // namespace tandem::cpu
