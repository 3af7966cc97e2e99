// Seeded inputs and their exact products, generated on the device by the counter-based generator
// that the CPU uses, too: a check needs no communication and no stored reference.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/fill.h"
#include "tandem/quantize.h"

namespace tandem::gpu {

/// Expected output: sum over t < terms of x_t[m, k] x w_t[n, k]^T in f64, where x_t and w_t are the
/// `fill_uniform` values of streams x_stream + t and w_stream + t, rounded to `dtype`. e4m3: times
/// the `fill_scales` values of x_scales + t and w_scales + t, per row (x's from first_row) or, per
/// tensor, element 0. Either operand may have k as its rows (x then with `first_row` 0).
struct ProductReference {
  uint64_t seed, x_stream, w_stream;
  int terms;
  int64_t k;
  int64_t first_row;  ///< row of x for the output's row 0
  DType dtype;
  /// Roundings of a partial sum to out's dtype before the final one: `roundings_of` the algorithm.
  int roundings = 1;
  Scaling scaling = Scaling::tensor;
  uint64_t x_scales = 0, w_scales = 0;
  bool x_is_km = false, w_is_kn = false;
  Values values = Values::any;  ///< both operands
  /// Stream of the `fill_uniform` values to add, in out's shape and dtype; 0: none.
  uint64_t residual_stream = 0;
  bool sum_is_rounded = false;  ///< before the residual is added
};

struct Verdict {
  /// Largest |out - exact| / max(|exact|, sqrt(k) of the products) of finite outputs.
  double max_rel = 0;
  /// Largest |out - exact| over its rounding bound; at most 1 if correct. Infinite if any output,
  /// compared or not, is not finite.
  double of_bound = 0;
  int64_t checked = 0;     ///< outputs compared
  int64_t not_finite = 0;  ///< over all outputs
  uint64_t digest = 0;     ///< equal for bitwise equal outputs
};

/// Compares up to `samples` outputs, spread over the matrix `out` [m, n], and checks all for NaN.
/// Blocks.
Verdict verify_product(const Tensor& out, const ProductReference& reference, int64_t samples,
                       cudaStream_t on);
/// Verifies an element-wise sum over r < terms of the `fill_uniform` values of x_stream + r.
Verdict verify_sum(const Tensor& out, uint64_t seed, uint64_t x_stream, int terms, cudaStream_t on);
/// Verifies `out` = rows of `hidden` x rsqrt(mean(hidden^2) + eps) x gain, all outputs.
Verdict verify_norm(const Tensor& out, const Tensor& hidden, const Tensor& gain, float eps,
                    cudaStream_t on);
uint64_t digest(const Tensor& tensor, cudaStream_t on);
/// Writes the digest to *sum, in device memory, without blocking.
void enqueue_digest(const Tensor& tensor, uint64_t* sum, cudaStream_t on);

}  // namespace tandem::gpu
