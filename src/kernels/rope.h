// Rotary position embedding, rotate-half convention (Hugging Face Llama): the pair (x[i], x[i +
// d/2]) of a head at position p is rotated by the angle p * theta^(-2i/d).
#pragma once

#include <cstdint>

#include "core/exec.h"
#include "kernels/rope_scaling.h"

namespace tandem {

/// Features of a head that rotate, and the length of all.
struct RopeShare {
  int64_t rotary_dim = -1;  ///< in pairs (x[i], x[i + d/2]) from i = 0 on; -1: all
  double length = 1;        ///< factor of q and of k
};

/// Cosines and sines of positions [0, max_seq), computed in double, on exec's device; with YaRN
/// both times its attention factor.
class RopeTable {
 public:
  RopeTable(const Exec& exec, int64_t max_seq, int64_t head_dim, double theta,
            const RopeScaling& scaling = {}, const RopeShare& share = {});
  int64_t half() const { return half_; }
  /// f32 [half], on the table's device.
  const float* cos(int64_t position) const { return cos_.as<float>() + position * half_; }
  const float* sin(int64_t position) const { return sin_.as<float>() + position * half_; }

 private:
  int64_t half_;
  Memory memory_;
  Tensor cos_, sin_;  // [max_seq, half]
};

}  // namespace tandem
