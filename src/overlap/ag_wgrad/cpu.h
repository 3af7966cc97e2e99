// The weight gradient on CPU ranks: products of pieces of the shards, in ring order, each as soon
// as its rows are here. The order in which pieces are added to dw is part of the result, so they
// depend on the shape alone, not on the chunks that are sent, and the serial strategy keeps them
// too.
#pragma once

#include "overlap/shard_gather.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"

namespace tandem {

class AgWgradCpu {
 public:
  AgWgradCpu(Communicator& comm, const AgWgrad::Shape& shape);
  void run(const Plan& plan, const Tensor& x, const Tensor& dy, const Tensor& dw);

 private:
  void add(const schedule::Range& rows, const Tensor& x, const Tensor& dy, const Tensor& dw);

  int rank_, world_;
  AgWgrad::Shape shape_;
  ShardGather gather_;
};

}  // namespace tandem
