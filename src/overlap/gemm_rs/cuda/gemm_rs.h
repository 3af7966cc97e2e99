// GEMM+RS on GPUs: out = this rank's rows of the sum over ranks of x[M, K] x weight^T, + bias
// (FLUX §3.1).
//
// chunked: one GEMM per owner, the others' rows first and the own last. The copy engine pushes each
// finished part to its owner while the next is computed; the owner then adds the parts in rank
// order, in f32. adding (adding.h): one persistent GEMM, whose tiles for others are stored into
// their owner's memory under later tiles, or pushed there by the copy engine, and whose own tiles
// add what the others sent as they go along. fused: the same on CUTLASS's GEMM, also for fewer
// rows; own tiles add the parts when they are finished. plain: nothing is hidden; the result is so
// small that a reduce-scatter by kernels costs less. Parts cross the wire rounded to the result's
// dtype, as NCCL's do; of e4m3 operands they are values, with the scales applied.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/adding.h"
#include "overlap/gemm_rs/cuda/fused.h"
#include "overlap/gemm_rs/cuda/piece_pushes.h"

namespace tandem::gpu {

struct FusedTile;

class GemmRs {
 public:
  /// Collective. K may differ by rank. The fused and the adding way are prepared, and their
  /// variants measured, where `way` is fused or automatic, adding also where it is asked for; made
  /// with another way, the operator has neither.
  GemmRs(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape, Way way = Way::automatic);
  /// x: [m, k]; out: [shard_of(m, size, rank).count, n]. Enqueues on the communicator's stream.
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
  /// Of `fused`, tile shapes and paces; of `adding`, how tiles get to their owners. No other way
  /// has variants. The fastest is in use unless another is asked for: the same on every rank, and
  /// not while a stream is captured.
  int variants(Way way) const;
  int variant(Way way) const {
    return known(way, way == Way::adding ? adding_variant_ : fused_variant_);
  }
  void use_variant(Way way, int variant);
  std::string describe(Way way) const { return variant_name(way, variant(way)); }
  /// What a variant would record in a TileLog; nothing where its kernel was compiled without.
  RecordedTiles recorded_tiles(Way way, int variant) const;
  /// Where fused and adding calls record from now on; `log` outlives them.
  void record_tiles(const TileLog& log) { timeline_ = log; }
  /// This rank's partial product alone: what perfect overlap would cost.
  void gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias = nullptr,
                 const Scales* scales = nullptr);

 private:
  struct TileKernel {
    const FusedTile* tile;
    std::unique_ptr<FusedRsKernel> kernel;
  };
  struct Words;
  Words& words() const;
  void make_adding();
  const AddingPlan& adding_plan() const;
  AddingShape adding_shape() const;
  int adding_slices() const;
  int first_landed() const;
  void run_adding(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                  const Scales* scales);
  void run_fused(const Tensor& x, const Tensor& weight, const Tensor& out);
  void run_pushed(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                  const void* bias, const Scales* scales);
  void enter();
  void push(int owner, const Tensor& part);
  void sum_parts(const Tensor& out);
  void run_nccl(const Tensor& out);
  void run_plain(const Tensor& out);
  int known(Way way, int variant) const {
    return known_variant("gemm_rs", way, variant, variants(way));
  }
  void choose_variant(Way way, Margin margin);
  std::string variant_name(Way way, int variant) const;
  int pace_of(int variant) const;
  Tensor part_of(int owner) const;
  Tensor whole_part() const;

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  Shard mine_;
  ScaledGemm whole_;
  std::vector<ScaledGemm> parts_;  // by owner
  int64_t slot_rows_;
  size_t slot_bytes_;                // of the staging memory, by source rank
  int tiles_of_slot_ = 0;            // signals of the fused way, by source rank
  std::vector<TileKernel> kernels_;  // empty where the shape has no fused way
  int fused_variant_ = 0;
  std::unique_ptr<AddingKernel> adding_;  // none where the shape has no such way
  int adding_variant_ = 0;
  TileLog timeline_;
  DeviceMemory partial_;  // [m, n]; the fused way: a slot per owner, of tiles on their way
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory words_;                 // struct Words
  std::optional<PiecePushes> pushes_;  // where a variant in use has the copy engine send
  CommonStream side_{Common::side};
  PacedCopies paced_;
  Event begun_, pushed_;
  std::vector<Event> computed_;  // by owner
  bool has_plain_;
  Way way_;
};

}  // namespace tandem::gpu
