// AG+GEMM on GPUs: out[M, N] = all-gather(x)[M, K] x weight^T + bias (FLUX §3.2).
//
// chunked: the copy engine pushes this rank's shard to the others (shard_pushes.h) while the local
// shard is multiplied in place; then one GEMM per shard as it arrives. fused: one persistent GEMM
// whose tiles wait for the rows they read, overlapped with the same transfers or, if faster, with
// transfers by a copy warp of every block (shard_copy_warp.cuh), in which case a call is one
// launch. serial_kernels: for x so small that an all-gather by kernels costs less.
//
// e4m3: x is sent as is, half the bytes of bf16. Scales by row are sent with their shard: right
// after the rows, or before them by copy warps. A single scale for all of x must be the same on
// every rank.
#pragma once

#include <memory>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gather/cuda/shard_pushes.h"

namespace tandem::gpu {

class AgGemm {
 public:
  /// Collective. N may differ by rank. The fused algorithm is prepared, and its variants measured,
  /// if `algorithm` is fused or automatic; otherwise the operator does not have it.
  AgGemm(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Algorithm algorithm = Algorithm::automatic);
  /// x: [shard_of(m, size, rank).count, k]; out: [m, n]. Enqueues on the communicator's stream.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr) {
    run(algorithm_, x, weight, out, bias, scales);
  }
  /// Runs the given one of `algorithms()` instead of the chosen one.
  void run(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias = nullptr, const Scales* scales = nullptr);
  Algorithm algorithm() const { return algorithm_; }
  std::vector<Algorithm> algorithms() const;
  /// GEMM algorithm of e4m3 operands.
  GemmAlgorithm gemm_algorithm() const { return whole_.algorithm(); }
  /// Number of variants; only `fused` has some: tile shapes, transfer by copy engine or copy warps,
  /// and orders. The fastest is in use unless `use_variant` selects another.
  int variants(Algorithm algorithm) const {
    return algorithm == Algorithm::fused ? int(fused_.size()) : 0;
  }
  int variant(Algorithm algorithm) const { return known(algorithm, fused_variant_); }
  void use_variant(Algorithm algorithm, int variant) { fused_variant_ = known(algorithm, variant); }
  std::string describe(Algorithm algorithm) const {
    return fused_[size_t(variant(algorithm))].name;
  }
  /// Tiles that a variant records in a TileLog; none if its kernel was compiled without recording.
  RecordedTiles recorded_tiles(Algorithm algorithm, int variant) const;
  /// Whether the copy engine transfers a variant's shards; only then can a timeline time them.
  bool pushes_by_engine(int variant) const { return by_engine_[size_t(variant)]; }
  /// Sets the log that fused calls record to; `log` must outlive them.
  void record_tiles(const TileLog& log) { timeline_ = log; }
  /// Forwards to ShardPushes::time, for a timeline.
  void time_pushes(std::vector<Event>* times) { pushes_.time(times); }
  int push_target(int step) const { return pushes_.target(step); }
  /// [m, k]: holds the remote rows after a run, and all rows with keep_gathered.
  Tensor gathered() const { return pushes_.gathered(); }
  /// Computes only the GEMM, on gathered rows: the cost under perfect overlap.
  void gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                 const Tensor* bias = nullptr, const Scales* scales = nullptr);

 private:
  int known(Algorithm algorithm, int variant) const {
    return known_variant("ag_gemm", algorithm, variant, variants(algorithm));
  }
  void make_fused();
  /// Adds the candidates of the newest kernel, whose tiles are called `tile`.
  void add_fused(const char* tile, bool with_copy_warps);
  void launch_fused(FusedAgKernel& kernel, FusedAgArgs args, const Operands& o);
  void run_serial(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                  const void* bias, const Scales* scales);
  void run_chunked(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                   const Scales* scales);
  ScalePointers scales_of(const Scales* scales, int64_t row) const;

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  ScaledGemm whole_;
  std::vector<ScaledGemm> shards_;  // by rank
  ShardPushes pushes_;
  // Empty if the shape does not support `fused`.
  std::vector<std::unique_ptr<FusedAgKernel>> kernels_;
  std::vector<Candidate> fused_;
  // By variant.
  std::vector<const FusedAgKernel*> kernel_of_;
  std::vector<bool> by_engine_;
  int fused_variant_ = 0;
  TileLog timeline_;
  bool has_serial_kernels_;
  Algorithm algorithm_;
};

}  // namespace tandem::gpu
