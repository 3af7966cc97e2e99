// The weight gradient on CPU ranks: one product per shard of rows, in ring order, each as soon as
// its rows are here. The order in which shards are added to dw is part of the result, so the serial
// strategy keeps it too, and a shard's product is never split.
#pragma once

#include "overlap/shard_gather.h"
#include "tandem/overlap.h"

namespace tandem {

class AgWgradCpu {
 public:
  AgWgradCpu(Communicator& comm, const AgWgrad::Shape& shape);
  void run(const Plan& plan, const Tensor& x, const Tensor& dy, const Tensor& dw);

 private:
  void add(int owner, const Tensor& x, const Tensor& dy, const Tensor& dw);

  int rank_, world_;
  AgWgrad::Shape shape_;
  ShardGather gather_;
};

}  // namespace tandem
