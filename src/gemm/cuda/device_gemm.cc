#include "gemm/cuda/device_gemm.h"

#include <fmt/format.h>

#include <map>
#include <memory>

#include "core/cuda/stream_watch.h"
#include "gemm/cuda/gemm_lt.h"
#include "gemm/cuda/rows_gemm.h"
#include "gemm/cuda/rows_product.h"
#include "gemm/cuda/scaled_gemm.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

/// The number of rows whose fastest algorithm runs GEMMs with the same bits for any number.
constexpr int64_t kRowsOfAll = 1024;

/// GEMMs of one thread on its share of a GPU.
struct Gemms {
  LtContext lt;
  std::map<GemmShape, LtGemm> by_shape;
  std::map<GemmShape, ScaledGemm> scaled;
};

Gemms& gemms_here() {
  // A context keeps its share alive, so the key is not reused.
  thread_local std::map<const GpuShare*, std::unique_ptr<Gemms>> all;
  auto& one = all[this_share().get()];
  if (!one) one = std::make_unique<Gemms>();
  return *one;
}

/// Whether `tensor` is the transpose of a contiguous matrix. Throws unless it is that or one, at a
/// multiple of 16 bytes, as both cuBLASLt's kernels and ours read vectors. A column is the
/// transpose of a row, whose bytes are aligned.
bool is_transposed(const char* name, const Tensor& tensor) {
  if (reinterpret_cast<uintptr_t>(tensor.data()) % 16 != 0) {
    throw InvalidArgument(fmt::format("gemm: {} {} at {}: expected a multiple of 16 bytes on a GPU",
                                      name, tensor.describe(), fmt::ptr(tensor.data())));
  }
  const bool is_matrix = tensor.dims() == 2,
             is_column = is_matrix && tensor.dim(0) > 1 && tensor.dim(1) == 1;
  if (is_matrix && tensor.contiguous() && !is_column) return false;
  if (is_matrix && tensor.transposed().contiguous()) return true;
  throw InvalidArgument(
      fmt::format("gemm: {} {}: expected a contiguous matrix or its transpose on a GPU", name,
                  tensor.describe()));
}

void check_same_bits(SameBits same_bits) {
  if (same_bits == SameBits::no || has_rows_product()) return;
  throw Unsupported("gemm: same_bits: needs a Hopper GPU (and TANDEM_GPU_PORTABLE unset)");
}

}  // namespace

void gemm(CUstream_st* stream, const Tensor& a, const Tensor& b, const Tensor& out,
          const GemmOptions& options) {
  if (options.bias) throw InvalidArgument("gemm: bias: expected none on a GPU");
  const bool swaps = is_transposed("out", out);
  if (options.same_bits != SameBits::no && (swaps || is_transposed("a", a))) {
    throw InvalidArgument(fmt::format("gemm: same_bits: a {}, out {}: expected contiguous rows",
                                      a.describe(), out.describe()));
  }
  if (swaps) {
    return gemm(stream, b.transposed(), a.transposed(), out.transposed(), options);
  }
  const GemmShape shape{.m = a.dim(0),
                        .n = b.dim(1),
                        .k = a.dim(1),
                        .in = a.dtype(),
                        .out = out.dtype(),
                        .weight_is_kn = !is_transposed("b", b),
                        .x_is_km = is_transposed("a", a),
                        .accumulate = options.accumulate,
                        .same_bits = options.same_bits == SameBits::many_rows};
  if (b.dim(0) != shape.k || out.dim(0) != shape.m || out.dim(1) != shape.n ||
      b.dtype() != a.dtype()) {
    throw InvalidArgument(fmt::format("gemm: a {}, b {}, out {}: sizes or dtypes do not match",
                                      a.describe(), b.describe(), out.describe()));
  }
  check_same_bits(options.same_bits);
  // The bytes of the weight bound it: cuBLASLt's kernels read them no faster, and start later.
  if (options.same_bits != SameBits::many_rows && !shape.weight_is_kn && !shape.x_is_km &&
      is_rows_gemm(a, b.transposed(), out)) {
    return rows_gemm(stream, a, b.transposed(), out,
                     {.accumulate = options.accumulate,
                      .early = options.reads_b_early,
                      .same_bits = options.same_bits == SameBits::few_rows});
  }
  if (options.same_bits == SameBits::few_rows && shape.k > 0 && out.elements() > 0) {
    throw Unsupported(fmt::format(
        "gemm: same_bits of few rows: a {}, b {}: expected bf16, a weight [N, K], K in multiples "
        "of 64",
        a.describe(), b.describe()));
  }
  Gemms& gemms = gemms_here();
  auto at = gemms.by_shape.find(shape);
  if (at == gemms.by_shape.end()) {
    // Sums over the rows have the same number in each call, or are in the bits of the result.
    int64_t timed_m = shape.x_is_km ? shape.m : timed_gemm_rows(shape.m);
    if (shape.same_bits) timed_m = kRowsOfAll;
    // Timing waits for the device: no kernel of this stream may wait for a peer then.
    LtGemm created(gemms.lt, shape, timed_m, [&] { await_stream(stream, "gemm"); });
    at = gemms.by_shape.emplace(shape, std::move(created)).first;
  }
  at->second.run(a.data(), b.data(), out.data(), nullptr, stream);
}

void gemm(CUstream_st* stream, const QuantizedRows& a, const QuantizedRows& b, const Tensor& out,
          bool accumulate) {
  const GemmShape shape{.m = a.codes.dim(0),
                        .n = b.codes.dim(0),
                        .k = a.codes.dim(1),
                        .in = DType::e4m3,
                        .out = out.dtype(),
                        .scaling = Scaling::row,
                        .accumulate = accumulate};
  for (const auto& [name, tensor] : {std::pair("a", &a.codes), {"b", &b.codes}, {"out", &out}}) {
    if (!is_transposed(name, *tensor)) continue;
    throw InvalidArgument(
        fmt::format("gemm: {} {}: expected contiguous rows", name, tensor->describe()));
  }
  if (b.codes.dim(1) != shape.k || out.dim(0) != shape.m || out.dim(1) != shape.n) {
    throw InvalidArgument(fmt::format("gemm: a {}, b {}, out {}: sizes do not match",
                                      a.codes.describe(), b.codes.describe(), out.describe()));
  }
  Gemms& gemms = gemms_here();
  auto at = gemms.scaled.find(shape);
  if (at == gemms.scaled.end()) {
    await_stream(stream, "gemm");  // as above
    at = gemms.scaled.try_emplace(shape, gemms.lt, shape).first;
  }
  at->second.run(a.codes.data(), b.codes.data(), out.data(), nullptr, stream,
                 {a.scales.as<const float>(), b.scales.as<const float>()});
}

bool gemm_swiglu(CUstream_st* stream, const Tensor& a, const Tensor& weight, const Tensor& out,
                 SameBits same_bits) {
  check_same_bits(same_bits);
  if (same_bits == SameBits::many_rows || !is_rows_gemm(a, weight, out) ||
      out.dtype() != DType::bf16) {
    return false;
  }
  rows_gemm_swiglu(stream, a, weight, out, same_bits == SameBits::few_rows);
  return true;
}

}  // namespace tandem::gpu
