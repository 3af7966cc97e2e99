// Matrices of a rank's model in int8 (gemm/int8_weight.h), for CPU ranks: those of the branches'
// GEMMs, the experts and the head.
#pragma once

#include <map>

#include "engine/model/weight_writer.h"
#include "gemm/int8_weight.h"

namespace tandem {

/// Throws Unsupported naming the size whose division over `tp` ranks has no weights in int8, as
/// groups of inputs would cross ranks.
void check_int8_weights(const ModelConfig& config, int tp);

/// Sets the matrices in `values`, f32 [layout.size], to what they are in int8; a tied head's
/// embedding is among them.
void round_to_int8(const ModelLayout& layout, const Tensor& values);

class Int8Weights {
 public:
  /// Sets the matrices one by one: set(p, views) writes each of their parameters, in f32. Weights,
  /// but not the sums of products, are the same for any number of ranks.
  void set(const ModelLayout& layout, const SetParameter& set);
  /// Bytes of memory.
  size_t bytes() const;
  /// Throws std::out_of_range for a matrix other than those.
  const Int8Weight& at(const WeightMatrix& matrix) const { return matrices_.at(matrix.offset); }

 private:
  std::map<int64_t, Int8Weight> matrices_;  // by offset
};

}  // namespace tandem
