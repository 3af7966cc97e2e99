// Weight in int8 for inference on CPU ranks (weight-only quantization): rows have a scale for every
// 64 inputs, products are in f32. Each weight is read once a product, as one byte.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem {

/// Consecutive inputs of a row that share a scale.
constexpr int64_t kInt8Group = 64;
/// Bytes of a weight with its share of a bf16 scale.
constexpr double kInt8WeightBytes = 1 + 2.0 / double(kInt8Group);

class Int8Weight {
 public:
  /// Quantizes `weight`, f32 [N, K], contiguous, finite. A group's scale is its max magnitude /
  /// 127, rounded up to bf16, a value the nearest multiple of it: the error of a weight is at most
  /// half a scale. A group does not depend on others.
  explicit Int8Weight(const Tensor& weight);

  /// out[M, n] = x[M, K] x rows [first_row, first_row + n) of the weight^T. x and out: f32 or bf16,
  /// with contiguous rows. Products of f32 with the weights as scale x value, which is exact, are
  /// added in f32, in 16 sums over k. A row has the same bits however many other rows there are.
  /// Throws InvalidArgument naming the operand whose shape does not fit.
  void multiply(const Tensor& x, const Tensor& out, int64_t first_row = 0) const;

  /// Writes the weight as it is multiplied, f32 [N, K].
  void read(const Tensor& to) const;
  /// Bytes of memory.
  size_t bytes() const { return values_.bytes() + scales_.bytes(); }

 private:
  int64_t rows_, columns_, groups_;
  Memory values_;  // int8 [rows, groups x kInt8Group], 0 after `columns`
  Memory scales_;  // bf16 [rows, groups]
};

}  // namespace tandem
