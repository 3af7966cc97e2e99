// Layers of a decoder on the rows of a step, whichever way the ranks hold them.
#pragma once

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem {

class RowRunner {
 public:
  virtual ~RowRunner() = default;
  /// Whether it is worth running a step of `count` rows, at most the constructor's.
  virtual bool takes(int64_t count) const = 0;
  /// Runs the layers on the tokens of the first `count` rows, which the cache knows
  /// (KvCache::set_rows); `tokens`: i32 [the constructor's rows]. Collective.
  virtual void run(const Tensor& tokens, int64_t count) = 0;
  /// out = residuals of the rows `chosen` of the last step, i32 [n], f32 [n, hidden], on every
  /// rank. Collective.
  virtual void gather(const Tensor& chosen, const Tensor& out) = 0;
};

}  // namespace tandem
