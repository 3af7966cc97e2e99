// The dense operators for ranks that reach only their own memory (several nodes, or GPUs that
// cannot map each other): NCCL moves the data, cuBLASLt multiplies, streams wait. The only custom
// kernels are the sum and the norm after it, so nothing here depends on the architecture.
//
// serial_nccl: the whole GEMM and the collective, one after the other. chunked: AG+GEMM and the
// weight gradient multiply a shard while NCCL exchanges the next pair; GEMM+RS sends a shard while
// the next is multiplied, and the owner adds in rank order, in f32. GEMM+AR is serial.
#pragma once

#include <vector>

#include "gemm/cuda/gemm_lt.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/contract/operator.h"
#include "overlap/gather/cuda/wgrad_gemm.h"

namespace tandem::gpu {

class AcrossNodes {
 public:
  /// Collective. Throws Unsupported for e4m3.
  AcrossNodes(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape);
  /// They refer to this object. Operands as for the operator's class.
  std::vector<Candidate> candidates();
  /// AG+GEMM: [m, k]; holds the remote rows after a run, and all rows with keep_gathered.
  Tensor gathered() const;

 private:
  void run_serial(const Operands& o);
  void gather_chunked(const Operands& o);
  /// `accumulate`: to dw.
  void multiply(int source, const void* in, const Operands& o, bool accumulate);
  void scatter_chunked(const Operands& o);
  void exchange(const Tensor& to_send, int to, const Tensor& to_receive, int from);
  Tensor rows_of(const DeviceMemory& memory, int64_t columns, int rank) const;
  Shard shard(int rank) const { return shard_of(shape_.m, comm_.size(), rank); }

  GpuCommunicator& comm_;
  bool gathers_, scatters_, sums_;  // the collective
  OpDesc shape_;
  std::vector<LtGemm> gemms_;      // by source rank of the rows; the last one: all rows
  std::vector<WgradGemm> wgrads_;  // likewise, for the weight gradient
  DeviceMemory whole_memory_;      // AG: gathered [m, k]; RS, AR: partial [m, n]
  DeviceMemory slots_;             // RS: [rank][rows of the local shard][n]
  CommonStream side_{Common::side};
  Event begun_;
  std::vector<Event> moved_, computed_;  // by rank
};

/// The operator that `desc` names, by these candidates.
std::unique_ptr<OverlapOperator> make_across_nodes(GpuCommunicator& comm, const OpDesc& desc,
                                                   const OverlapOptions& options);

}  // namespace tandem::gpu
