// The weight gradient of AG+GEMM on GPUs: dw[N, K] (+)= dy[M, N]^T x all-gather(x)[M, K], in f32.
//
// chunked: the copy engine pushes this rank's shard to the others (shard_pushes.h) while the local
// rows' GEMM, read in place, is added to dw; then one GEMM per shard as it arrives, in ring order,
// which therefore affects the result. The serial algorithms add one GEMM over all rows.
#pragma once

#include <vector>

#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/gather/cuda/shard_pushes.h"
#include "overlap/gather/cuda/wgrad_gemm.h"

namespace tandem::gpu {

class AgWgrad {
 public:
  /// Collective. N may differ by rank. weight_is_kn: dw is stored [K, N].
  AgWgrad(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape);
  /// They refer to this object, and enqueue on the communicator's stream. x:
  /// [shard_of(m, size, rank).count, k]; weight is dy: [m, n]; out is dw: f32, added to, or
  /// replaced without `accumulate`.
  const std::vector<Candidate>& candidates() const { return candidates_; }
  /// Computes only the GEMM, with x already gathered: the cost under perfect overlap.
  void gemm_only(const Operands& o);

 private:
  void run_chunked(const Operands& o);

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  WgradGemm whole_;
  std::vector<WgradGemm> shards_;  // by rank
  ShardPushes pushes_;
  std::vector<Candidate> candidates_;
};

}  // namespace tandem::gpu
