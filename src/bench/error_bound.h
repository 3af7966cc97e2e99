// Bound of the rounding error of an output, for the checks of GPU results (bench/cuda/verify.h). As
// tight as the intended computation allows: a sum accumulated in bf16, or rounded once more than it
// should be, exceeds it in some output of a matrix.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tandem/dtype.h"

namespace tandem {

/// Max K after which sums of e4m3 products are promoted from the tensor cores to f32.
constexpr int kLatestPromotionK = 256;

/// Max error of rounding `value` to `dtype`: half a unit in the last place.
constexpr double half_ulp(double value, DType dtype) {
  const int bits = dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : 8;
  const double minimum = dtype == DType::f16 ? 0x1p-25 : 0x1p-126;  // for subnormal results
  const uint64_t exponent = std::bit_cast<uint64_t>(value) & 0x7ff0000000000000ull;
  const double half = std::bit_cast<double>(exponent) / double(1 << bits);
  return half > minimum ? half : minimum;
}

/// Max error of accumulation in f32, relative to the root of the sum of squared terms and relative
/// to the sum's magnitude.
struct AccumulationError {
  double of_root, of_sum;
};

/// f32, bf16 and f16: errors of single additions add up randomly, and tensor cores truncate below
/// the sum's last bit, once per 16 products: a bias in one direction, which grows. With split-K
/// tiles and bf16 output, a partial sum is passed on as the sum of two bf16 numbers. e4m3: Hopper's
/// tensor cores align 32 products and the running sum to the largest of them and keep 13 fraction
/// bits; the truncation error grows with the sum until it is promoted. If terms cancel, 256 of them
/// lose up to a thousandth of the root. If all have one sign, they lose up to 2.1 thousandths of
/// the sum, 512 about 5, and 1,024 at least 12.
inline AccumulationError accumulation_error(DType in, DType out, int64_t k) {
  if (in == DType::e4m3) return {0.003, 0x1p-8};
  const double terms = out == DType::bf16 ? 0x1p-16 : 0;
  const double all = (3 * std::sqrt(double(k)) + double(k) / 16) * 0x1p-24 + terms;
  return {all, all};
}

/// Error bound of one output, accumulated from its partial sums.
class ErrorBound {
 public:
  /// Adds a partial sum, rounded once to `out` by its rank if `rounded`. `root`: root of the sum of
  /// its squared terms.
  constexpr void add_partial(double sum, double root, const AccumulationError& lost, DType out,
                             bool rounded) {
    const double size = sum < 0 ? -sum : sum, error = lost.of_root * root + lost.of_sum * size;
    error_ += error + (rounded ? half_ulp(size + error, out) : 0);
    if (sizes_ > 0) error_ += half_ulp(sizes_ + size, DType::f32);
    sizes_ += size;
  }
  /// Adds the rounding of `times` running sums of the partial ones. None is larger than this.
  constexpr void round_running(int times, DType out) {
    error_ += times * half_ulp(sizes_ + error_, out);
  }
  /// Adds the rounding of the sum, or of a value derived from it, to `out`.
  constexpr void round(double value, DType out) {
    error_ += half_ulp((value < 0 ? -value : value) + error_, out);
  }
  constexpr double error() const { return error_; }

 private:
  double sizes_ = 0, error_ = 0;
};

}  // namespace tandem
