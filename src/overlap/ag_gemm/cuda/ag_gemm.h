// AG+GEMM on GPUs: out[M, N] = all-gather(x)[M, K] x weight^T + bias (FLUX §3.2).
//
// chunked: the copy engine pushes this rank's shard to the others (shard_pushes.h) while the local
// shard is multiplied in place; then one GEMM per shard as it arrives. fused: one persistent GEMM
// whose tiles wait for the rows they read, overlapped with the same transfers or with transfers by
// a copy warp of every block (shard_copy_warp.cuh), in which case a call is one launch; a candidate
// for each tile shape, transfer and order. serial_kernels: for x so small that an all-gather by
// kernels costs less.
//
// e4m3: x is sent as is, half the bytes of bf16. Scales by row are sent with their shard: right
// after the rows, or before them by copy warps. A single scale for all of x must be the same on
// every rank.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/ag_gemm/cuda/fused.h"
#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gather/cuda/shard_pushes.h"

namespace tandem::gpu {

class AgGemm {
 public:
  /// Collective. N may differ by rank. There are no fused candidates if `strategy` is serial.
  AgGemm(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Strategy strategy = Strategy::automatic);
  /// They refer to this object, and enqueue on the communicator's stream. x:
  /// [shard_of(m, size, rank).count, k]; out: [m, n].
  const std::vector<Candidate>& candidates() const { return candidates_; }
  /// GEMM algorithm of e4m3 operands.
  GemmAlgorithm gemm_algorithm() const { return whole_.algorithm(); }
  /// Tiles that a candidate records in a TileLog; none if it is not fused, or if its kernel was
  /// compiled without recording.
  RecordedTiles recorded_tiles(const Candidate& candidate) const;
  /// Whether a fused candidate's shards are sent by the copy engine; only then can a timeline time
  /// them.
  bool pushes_by_engine(const Candidate& candidate) const;
  /// Sets the log that fused calls record to; `log` must outlive them.
  void record_tiles(const TileLog& log);
  /// Forwards to ShardPushes::time, for a timeline.
  void time_pushes(std::vector<Event>* times);
  int push_target(int step) const { return pushes_.target(step); }
  /// [m, k]: holds the remote rows after a run, and all rows with keep_gathered.
  Tensor gathered() const { return pushes_.gathered(); }
  /// Computes only the GEMM, with x already gathered: the cost under perfect overlap.
  void gemm_only(const Operands& o);

 private:
  /// Transfer of the shards under a fused GEMM, and the order of its tiles.
  struct Transfer;
  static const Transfer kTransfers[];

  void add(std::string_view name, Strategy form, std::function<void(const Operands&)> run);
  /// `run` of the next candidate, whose `step` needs many driver calls.
  template <typename Step>
  std::function<void(const Operands&)> replayed(Step step);
  void add_candidates(Strategy strategy);
  void add_fused();
  void add_fused(FusedAgKernel& kernel, const char* tile, const Transfer& transfer);
  FusedAgArgs fused_args(const Operands& o, int local_first) const;
  void run_chunked(const Operands& o);
  void multiply(const ScaledGemm& gemm, const void* rows, const Tensor& out, const Operands& o,
                const ScalePointers& scales) const;
  const Tensor* sent_scales(const Operands& o) const;
  ScalePointers scales_of(const Scales* scales, int64_t row) const;

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  ScaledGemm whole_;
  std::vector<ScaledGemm> shards_;  // by rank
  ShardPushes pushes_;
  std::vector<std::unique_ptr<FusedAgKernel>> kernels_;
  std::vector<Candidate> candidates_;
  struct Fused {
    const FusedAgKernel* kernel;
    bool by_engine;
  };
  std::map<std::string, Fused> fused_;  // by candidate
  TileLog timeline_;
};

}  // namespace tandem::gpu
