// GEMM+RS on GPUs: out = this rank's rows of the sum over ranks of x[M, K] x weight^T, + bias (FLUX
// §3.1).
//
// chunked: one GEMM per owner, remote shards first and the local one last. The copy engine pushes
// each finished shard to its owner while the next is computed; the owner then sums the partials in
// rank order, in f32. fused (fused.h): one persistent GEMM. Remote tiles are stored into their
// owner's memory under later tiles, or pushed by the copy engine; local tiles add the received
// partials in their main loop. fused_cutlass (cutlass.h): the same on CUTLASS's GEMM, also for
// fewer rows; local tiles add the partials in their epilogue. serial_kernels: for results so small
// that a reduce-scatter by kernels costs less. Partials are sent rounded to the result's dtype, as
// NCCL sends them; with e4m3 operands they are values with the scales applied.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/chunk_pushes.h"
#include "overlap/gemm_rs/cuda/cutlass.h"
#include "overlap/gemm_rs/cuda/fused.h"

namespace tandem::gpu {

struct CutlassTile;

class GemmRs {
 public:
  /// Collective. K may differ by rank. The fused algorithms are prepared, and their variants
  /// measured, if `algorithm` is one of them or automatic. Otherwise the operator has neither.
  GemmRs(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Algorithm algorithm = Algorithm::automatic);
  /// x: [m, k]; out: [shard_of(m, size, rank).count, n]. Enqueues on the communicator's stream.
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
  /// Number of variants: for `fused`, deliveries; for `fused_cutlass`, tile shapes and send
  /// rates; 0 for others. The fastest is in use unless `use_variant` selects another: the same on
  /// every rank, and not during stream capture.
  int variants(Algorithm algorithm) const;
  int variant(Algorithm algorithm) const {
    return known(algorithm, algorithm == Algorithm::fused ? fused_variant_ : cutlass_variant_);
  }
  void use_variant(Algorithm algorithm, int variant);
  std::string describe(Algorithm algorithm) const {
    return variant_name(algorithm, variant(algorithm));
  }
  /// Tiles that a variant records in a TileLog; none if its kernel was compiled without recording.
  RecordedTiles recorded_tiles(Algorithm algorithm, int variant) const;
  /// Sets the log that calls of the fused algorithms record to; `log` must outlive them.
  void record_tiles(const TileLog& log) { timeline_ = log; }
  /// Computes only this rank's partial product: the cost under perfect overlap.
  void gemm_only(const Tensor& x, const Tensor& weight, const Tensor* bias = nullptr,
                 const Scales* scales = nullptr);

 private:
  struct CutlassTileKernel {
    const CutlassTile* tile;
    std::unique_ptr<CutlassRsKernel> kernel;
  };
  struct Words;
  Words& words() const;
  void make_fused();
  const TileDelivery& fused_delivery() const;
  FusedRsShape fused_shape() const;
  int fused_slices() const;
  int first_fused_slice() const;
  void run_fused(const Tensor& x, const Tensor& weight, const Tensor& out, const void* bias,
                 const Scales* scales);
  void run_cutlass(const Tensor& x, const Tensor& weight, const Tensor& out);
  void run_pushed(Algorithm algorithm, const Tensor& x, const Tensor& weight, const Tensor& out,
                  const void* bias, const Scales* scales);
  void enter();
  void push(int owner, const Tensor& partial);
  void sum_partials(const Tensor& out);
  void run_nccl(const Tensor& out);
  void run_serial_kernels(const Tensor& out);
  int known(Algorithm algorithm, int variant) const {
    return known_variant("gemm_rs", algorithm, variant, variants(algorithm));
  }
  void choose_variant(Algorithm algorithm, Margin margin);
  std::string variant_name(Algorithm algorithm, int variant) const;
  int pace_of(int variant) const;
  Tensor partial_of(int owner) const;
  Tensor whole_partial() const;

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  Shard local_;
  ScaledGemm whole_;
  std::vector<ScaledGemm> shard_gemms_;  // by owner
  int64_t slot_rows_;
  size_t slot_bytes_;                               // slots of the staging memory, by source rank
  int tiles_of_slot_ = 0;                           // signals of `fused_cutlass`, by source rank
  std::vector<CutlassTileKernel> cutlass_kernels_;  // empty without `fused_cutlass`
  int cutlass_variant_ = 0;
  std::unique_ptr<FusedRsKernel> fused_;  // null if the shape does not support `fused`
  int fused_variant_ = 0;
  TileLog timeline_;
  DeviceMemory partial_;  // [m, n]; fused: the send buffer, a slot per owner
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory words_;                 // struct Words
  std::optional<ChunkPushes> pushes_;  // set once a variant with copy-engine pushes is used
  CommonStream side_{Common::side};
  PacedCopies paced_;
  Event begun_, pushed_;
  std::vector<Event> computed_;  // by owner
  bool has_serial_kernels_;
  Algorithm algorithm_;
};

}  // namespace tandem::gpu
