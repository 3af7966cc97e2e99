#include "gemm/gemm.h"

#include <fmt/format.h>

#include "gemm/cuda/device_gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void check_same_bits(const Exec& exec, const Tensor& a, SameBits same_bits) {
  if (same_bits == SameBits::few_rows && a.dim(0) > kMaxFewRows) {
    throw InvalidArgument(fmt::format("gemm: a {} with same_bits of few rows: expected at most {}",
                                      a.describe(), kMaxFewRows));
  }
  if (same_bits != SameBits::no && !exec.on_gpu() && !rows_keep_bits()) {
    throw Unsupported("gemm: same_bits: needs AVX-512 or AVX2 on a CPU");
  }
}

}  // namespace

void gemm(const Exec& exec, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options) {
  check_same_bits(exec, a, options.same_bits);
  if (exec.on_gpu()) return gpu::gemm(exec.stream, a, b, out, options);
  gemm(a, b, out, options);
}

bool gemm_swiglu(const Exec& exec, const Tensor& a, const Tensor& weight, const Tensor& out,
                 SameBits same_bits) {
  check_same_bits(exec, a, same_bits);
  return exec.on_gpu() && gpu::gemm_swiglu(exec.stream, a, weight, out, same_bits);
}

bool times_algorithms(const Exec& exec) {
  return exec.on_gpu();
}

}  // namespace tandem
