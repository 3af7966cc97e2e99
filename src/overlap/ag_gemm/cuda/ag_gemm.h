// AG+GEMM on GPUs: out[M, N] = all-gather(x)[M, K] x weight^T + bias (FLUX §3.2).
//
// chunked: the copy engine pushes this rank's shard to the others (shard_pushes.h) while the own
// shard is multiplied in place; then a GEMM per shard as it arrives. fused: one persistent GEMM
// whose tiles wait for the rows they read, beside the same transfers or, where that is faster, with
// a warp of every block that carries them (shard_courier.cuh): then it is one launch and nothing
// else. plain: nothing is hidden; x is so small that an all-gather by kernels costs less.
//
// e4m3: x travels as it is, half the bytes of bf16, and with scales by row those of the shard's
// rows: right behind them, or by couriers before them. One scale for all of x is the same on every
// rank.
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
  /// Collective. N may differ by rank. The fused way is prepared, and its variants measured, where
  /// `way` is fused or automatic; made with another way, the operator has none.
  AgGemm(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Way way = Way::automatic);
  /// x: [shard_of(m, size, rank).count, k]; out: [m, n]. Enqueues on the communicator's stream.
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias = nullptr,
           const Scales* scales = nullptr) {
    run(way_, x, weight, out, bias, scales);
  }
  /// The same by one of `ways()`, whatever was chosen.
  void run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
           const Tensor* bias = nullptr, const Scales* scales = nullptr);
  Way way() const { return way_; }
  std::vector<Way> ways() const;
  /// How e4m3 operands are multiplied.
  ProductWay product_way() const { return whole_.way(); }
  /// Only `fused` has variants: tile shapes, who moves the shards, and orders. The fastest is in
  /// use unless another is asked for.
  int variants(Way way) const { return way == Way::fused ? int(variants_.size()) : 0; }
  int variant(Way way) const { return known(way, fused_variant_); }
  void use_variant(Way way, int variant) { fused_variant_ = known(way, variant); }
  std::string describe(Way way) const { return variant_name(variant(way)); }
  /// What a variant would record in a TileLog; nothing where its kernel was compiled without.
  RecordedTiles recorded_tiles(Way way, int variant) const;
  /// Whether the copy engine moves a variant's shards: only then does a timeline know when.
  bool pushes_by_engine(int variant) const;
  /// Where fused calls record from now on; `log` outlives them.
  void record_tiles(const TileLog& log) { timeline_ = log; }
  /// ShardPushes' own, for a timeline.
  void time_pushes(std::vector<Event>* times) { pushes_.time(times); }
  int push_target(int step) const { return pushes_.target(step); }
  /// [m, k]: after a run the others' rows, and all if the shape says keep_gathered.
  Tensor gathered() const { return pushes_.gathered(); }
  /// The product alone, of rows that are already here: what perfect overlap would cost.
  void gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                 const Tensor* bias = nullptr, const Scales* scales = nullptr);

 private:
  struct TileKernel {
    const char* tile;
    std::unique_ptr<FusedAgKernel> kernel;
  };
  struct Variant {
    int kernel, plan;
  };

  int known(Way way, int variant) const {
    return known_variant("ag_gemm", way, variant, variants(way));
  }
  void run_fused(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                 const Scales* scales);
  std::string variant_name(int variant) const;
  std::vector<std::string> variant_names() const;
  void run_serial(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
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
  std::vector<TileKernel> kernels_;  // empty where the shape has no fused way
  std::vector<Variant> variants_;
  int fused_variant_ = 0;
  TileLog timeline_;
  bool has_plain_;
  Way way_;
};

}  // namespace tandem::gpu
