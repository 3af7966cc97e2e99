// A toy operator that shows the requirements of a new one: out = factor x all-gather(x), with the
// factor in the weight's only element. A real one would be in src/overlap/gather_scale/.
//
// Six files, all in this folder, make it an operator of CPU and GPU ranks, of `tandem bench` and of
// Python, with its tests: this one, gather_scale.cc, cuda/gather_scale.cu, no_cuda.cc,
// CMakeLists.txt and seams_test.cc.
#pragma once

#include <memory>
#include <vector>

#include "overlap/contract/operator_row.h"
#include "overlap/gather/cpu.h"

namespace tandem::test {

OpDesc gather_scale_desc(const Communicator& comm, int64_t m, int64_t k, DType dtype);

/// Collective, on GPU ranks (cuda/gather_scale.cu).
std::unique_ptr<OverlapOperator> gather_scale_on_gpu(Communicator& comm, const OpDesc& desc,
                                                     const OverlapOptions& options);

class GatherScaleCpu {
 public:
  GatherScaleCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);

 private:
  void run(Strategy form, int chunks, const Operands& operands);

  int rank_, world_;
  OpDesc desc_;
  ShardGather gather_;
};

extern const OperatorRow kGatherScaleRow;

}  // namespace tandem::test
