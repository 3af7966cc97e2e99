// The weight gradient on CPU ranks: one GEMM per slice of a shard, in ring order, as soon as its
// rows have arrived. The order in which slices are added to dw affects the result, so slices depend
// only on the shape, not on the transfer chunks, and the serial strategy uses them too.
#pragma once

#include <vector>

#include "overlap/gather/cpu.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

class AgWgradCpu {
 public:
  AgWgradCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  void run(Strategy form, int chunks, bool encoded, const Operands& operands);
  void multiply(const schedule::Range& rows, const Tensor& x, const Operands& operands,
                bool accumulate);

  int rank_, world_;
  OpDesc desc_;
  ShardGather gather_;
};

}  // namespace tandem
