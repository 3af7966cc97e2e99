// The weight gradient of AG+GEMM on GPUs: dw[N, K] += dy[M, N]^T x all-gather(x)[M, K], in f32.
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
  AgWgrad(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
          Algorithm algorithm = Algorithm::automatic);
  /// x: [shard_of(m, size, rank).count, k]; dy: [m, n]; dw: f32, added to. Enqueues on the
  /// communicator's stream.
  void run(const Tensor& x, const Tensor& dy, const Tensor& dw) { run(algorithm_, x, dy, dw); }
  /// Runs the given one of `algorithms()` instead of the chosen one.
  void run(Algorithm algorithm, const Tensor& x, const Tensor& dy, const Tensor& dw);
  Algorithm algorithm() const { return algorithm_; }
  std::vector<Algorithm> algorithms() const;
  /// Computes only the GEMM, on gathered rows: the cost under perfect overlap.
  void gemm_only(const Tensor& gathered, const Tensor& dy, const Tensor& dw);

 private:
  void run_serial(Algorithm algorithm, const Tensor& x, const Tensor& dy, const Tensor& dw);
  void run_chunked(const Tensor& x, const Tensor& dy, const Tensor& dw);

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  WgradGemm whole_;
  std::vector<WgradGemm> shards_;  // by rank
  ShardPushes pushes_;
  Algorithm algorithm_;
};

}  // namespace tandem::gpu
