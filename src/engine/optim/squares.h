// Sums of squares, for the gradient norm. The order of summation depends only on the lengths.
#pragma once

#include <cstdint>
#include <vector>

#include "core/exec.h"

namespace tandem {

/// Squares of consecutive gradients of uniform properties in one bucket, on their owner.
struct SquareTerm {
  int32_t group = 0;
  bool replicated = false;  ///< on every TP rank; else sharded over them
  int64_t bucket = 0;       ///< of the whole model
  int64_t begin = 0;        ///< first element in the whole model's array of the group
  double sum = 0;
  int32_t replica = 0;  ///< logical replica whose shard has them
};

struct Squares {
  double sharded = 0, replicated = 0;  ///< TP-sharded and TP-replicated parameters
};
/// In an order of summation that does not depend on the terms' own.
Squares sum_terms(std::vector<SquareTerm> terms);

/// Sums that are kept where the values are: on a GPU `add` is enqueued and not waited for.
class SquareSums {
 public:
  SquareSums(const Exec& exec, int sums);
  /// sums[index] += sum of the squares of `values`, f32 and contiguous.
  void add(int index, const Tensor& values);
  /// The sums since the last call, which restart at 0. Waits for the stream.
  std::vector<double> take();

 private:
  Exec exec_;
  int count_;
  Memory sums_;  // and scratch
};

}  // namespace tandem
