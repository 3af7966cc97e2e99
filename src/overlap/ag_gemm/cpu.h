// AG+GEMM on CPU ranks: the own rows first, then each chunk of the others as it arrives.
#pragma once

#include "overlap/shard_gather.h"
#include "tandem/overlap.h"

namespace tandem {

class AgGemmCpu {
 public:
  AgGemmCpu(Communicator& comm, const AgGemm::Shape& shape);
  void run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias);
  Tensor gathered() const { return gather_.all(); }

 private:
  int rank_, world_;
  AgGemm::Shape shape_;
  ShardGather gather_;
};

}  // namespace tandem
