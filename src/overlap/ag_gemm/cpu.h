// AG+GEMM on CPU ranks: local rows first, then each remote chunk as it arrives. With a wire format,
// shards are encoded once and each chunk is decoded before its GEMM; local rows are also used as
// decoded, so that all ranks multiply the same bits. A single rank sends and encodes nothing.
#pragma once

#include <optional>
#include <vector>

#include "overlap/contract/rows_product.h"
#include "overlap/gather/cpu.h"
#include "tandem/overlap.h"
#include "tune/candidate.h"
#include "tune/op_desc.h"

namespace tandem {

class AgGemmCpu {
 public:
  AgGemmCpu(Communicator& comm, const OpDesc& desc);
  std::vector<Candidate> candidates(const std::vector<int>& chunk_counts);
  Tensor gathered() const { return gather_.all(); }

 private:
  void run(Strategy form, int chunks, bool encoded, const Operands& operands);
  /// Scales of gathered rows starting at `row`, of e4m3.
  const float* scales_of(const Operands& operands, int64_t row) const;

  int rank_, world_;
  OpDesc desc_;
  RowsProduct product_;
  ShardGather gather_;
  std::optional<ShardGather> scales_;  ///< with a scale per row
};

}  // namespace tandem
