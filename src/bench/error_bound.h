// How far rounding may take an output from the exact one: what the checks of GPU results compare
// with (bench/cuda/verify.h). As narrow as what is meant to be computed allows: a sum that is
// kept in bf16, or rounded once more on its way than it should be, is beyond it in some output of a
// matrix.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "tandem/dtype.h"

namespace tandem {

/// Sums of e4m3 products are promoted from the tensor cores to f32 after so much of K at the
/// latest.
constexpr int kLatestPromotionK = 256;

/// What rounding `value` to `dtype` may cost: half a unit in the last place.
constexpr double half_ulp(double value, DType dtype) {
  const int bits = dtype == DType::f32 ? 24 : dtype == DType::f16 ? 11 : 8;
  const double least = dtype == DType::f16 ? 0x1p-25 : 0x1p-126;  // of subnormal numbers
  const uint64_t exponent = std::bit_cast<uint64_t>(value) & 0x7ff0000000000000ull;
  const double half = std::bit_cast<double>(exponent) / double(1 << bits);
  return half > least ? half : least;
}

/// What accumulating a product in f32 may cost: so much of the root of the sum of its squared
/// terms, and so much of its own size.
struct AccumulationError {
  double of_root, of_sum;
};

/// f32, bf16 and f16: errors of single additions add up as at random, and tensor cores cut off what
/// lies below the sum's last bit, once per 16 products: a loss in one direction, which grows. Where
/// tiles are split along K and bf16 comes out, a part is handed over as the sum of two bf16
/// numbers. e4m3: Hopper's tensor cores align 32 products and the sum so far to the largest of them
/// and keep 13 bits behind its point; what is cut off grows with the sum until it is promoted.
/// Where terms cancel out, 256 of them cost up to a thousandth of the root. Where all have one
/// sign, they cost up to 2.1 thousandths of the sum, 512 about 5, and 1,024 at least 12.
inline AccumulationError accumulation_error(DType in, DType out, int64_t k) {
  if (in == DType::e4m3) return {0.003, 0x1p-8};
  const double parts = out == DType::bf16 ? 0x1p-16 : 0;
  const double all = (3 * std::sqrt(double(k)) + double(k) / 16) * 0x1p-24 + parts;
  return {all, all};
}

/// One output and what it is the sum of.
class ErrorBound {
 public:
  /// A partial sum that is rounded to `out` once, if `rounded`: by its rank. `root`: of the sum of
  /// its squared terms.
  constexpr void add_partial(double sum, double root, const AccumulationError& lost, DType out,
                             bool rounded) {
    const double size = sum < 0 ? -sum : sum, error = lost.of_root * root + lost.of_sum * size;
    error_ += error + (rounded ? half_ulp(size + error, out) : 0);
    if (sizes_ > 0) error_ += half_ulp(sizes_ + size, DType::f32);
    sizes_ += size;
  }
  /// Running sums of the partial ones are rounded too, so many times. None is larger than this.
  constexpr void round_running(int times, DType out) {
    error_ += times * half_ulp(sizes_ + error_, out);
  }
  /// The sum so far, or what it has become, is rounded to `out`.
  constexpr void round(double value, DType out) {
    error_ += half_ulp((value < 0 ? -value : value) + error_, out);
  }
  constexpr double error() const { return error_; }

 private:
  double sizes_ = 0, error_ = 0;
};

}  // namespace tandem
