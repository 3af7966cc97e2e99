// Random operands of a rank, and room for its results: to measure forms with.
#pragma once

#include <cstdint>
#include <vector>

#include "overlap/attention/shape.h"

namespace tandem {

class ContextOperands {
 public:
  ContextOperands(const ContextGrid& grid, int64_t window);
  ContextForward forward() const { return {q, k, v, out, log_sums, mask}; }
  ContextBackward backward() const { return {q, k, v, out, log_sums, dout, dq, dk, dv, mask}; }

  AttentionMask mask;
  Tensor q, k, v, out, log_sums, dout, dq, dk, dv;

 private:
  std::vector<Memory> memory_;
};

}  // namespace tandem
