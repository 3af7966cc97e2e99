// The weight gradient on CPU ranks: products of pieces of the shards, in ring order, each as soon
// as its rows are here. The order in which pieces are added to dw is part of the result, so they
// depend on the shape alone, not on the chunks that are sent, and the serial strategy keeps them
// too.
#pragma once

#include <vector>

#include "overlap/gather/cpu.h"
#include "schedule/ring.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

OpDesc ag_wgrad_desc(const Communicator& comm, const AgWgrad::Shape& shape);

class AgWgradCpu {
 public:
  AgWgradCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  void run(Form form, int chunks, bool encoded, const Operands& operands);
  void add(const schedule::Range& rows, const Tensor& x, const Tensor& dy, const Tensor& dw);

  int rank_, world_;
  OpDesc desc_;
  ShardGather gather_;
};

}  // namespace tandem
