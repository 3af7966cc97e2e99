// Rotary position embedding, rotate-half convention (Hugging Face Llama): the pair (x[i], x[i +
// d/2]) of a head at position p is rotated by the angle p * theta^(-2i/d).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tandem/tensor.h"

namespace tandem {

/// Cosines and sines of positions [0, max_seq), computed in double.
class RopeTable {
 public:
  RopeTable(int64_t max_seq, int64_t head_dim, double theta);
  int64_t half() const { return half_; }
  const float* cos(int64_t position) const { return cos_.data() + position * half_; }
  const float* sin(int64_t position) const { return sin_.data() + position * half_; }

 private:
  int64_t half_;
  std::vector<float> cos_, sin_;
};

}  // namespace tandem
