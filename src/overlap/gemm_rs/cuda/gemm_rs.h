// GEMM+RS on GPUs: out = this rank's rows of the sum over ranks of x[M, K] x weight^T, + bias (FLUX
// §3.1).
//
// chunked: one GEMM per owner, remote shards first and the local one last. The copy engine pushes
// each finished shard to its owner while the next is computed; the owner then sums the partials in
// rank order, in f32. fused (fused.h): one persistent GEMM. Remote tiles are stored into their
// owner's memory under later tiles, or pushed by the copy engine; local tiles add the received
// partials in their main loop; a candidate for each delivery. fused_cutlass (cutlass.h): the same
// on CUTLASS's GEMM, also for fewer rows; local tiles add the partials in their epilogue; a
// candidate for each tile shape and send rate. serial_kernels: for results so small that a
// reduce-scatter by kernels costs less. Partials are sent rounded to the result's dtype, as NCCL
// sends them; with e4m3 operands they are values with the scales applied.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gemm/cuda/scaled_gemm.h"
#include "overlap/contract/cuda/call_graphs.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/gemm_rs/cuda/chunk_pushes.h"
#include "overlap/gemm_rs/cuda/cutlass.h"
#include "overlap/gemm_rs/cuda/fused.h"

namespace tandem::gpu {

class GemmRs {
 public:
  /// Collective. K may differ by rank. There are no fused candidates if `strategy` is serial.
  GemmRs(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
         Strategy strategy = Strategy::automatic);
  /// They refer to this object, and enqueue on the communicator's stream. x: [m, k]; out:
  /// [shard_of(m, size, rank).count, n].
  const std::vector<Candidate>& candidates() const { return candidates_; }
  /// Makes the streams that a delivery by the copy engine needs, which its first call makes too,
  /// but not during stream capture; drops those of others.
  void settle_on(const Candidate& chosen);
  /// GEMM algorithm of e4m3 operands.
  GemmAlgorithm gemm_algorithm() const { return whole_.algorithm(); }
  /// Tiles that a candidate records in a TileLog; none if it is not fused, or if its kernel was
  /// compiled without recording.
  RecordedTiles recorded_tiles(const Candidate& candidate) const;
  /// Sets the log that calls of fused candidates record to; `log` must outlive them.
  void record_tiles(const TileLog& log) { timeline_ = log; }
  /// Computes only this rank's partial product, whatever `out`: the cost under perfect overlap.
  void gemm_only(const Operands& o);

 private:
  struct Words;
  Words& words() const;
  void make_fused();
  FusedRsShape fused_shape() const;
  int fused_slices() const;
  int first_fused_slice() const;
  void add(std::string_view name, Strategy form, std::function<void(const Operands&)> run);
  void add_candidates(Strategy strategy);
  void add_deliveries();
  void add_cutlass();
  void make_pushes();
  void run_pushed(const Operands& o, bool serial);
  void run_fused(const Operands& o, int delivery);
  void enter();
  void push(int owner, const Tensor& partial);
  void sum_partials(const Tensor& out);
  Tensor partial_of(int owner) const;
  Tensor whole_partial() const;

  GpuCommunicator& comm_;
  CallGraphs graphs_;
  OpDesc shape_;
  Shard local_;
  ScaledGemm whole_;
  std::vector<ScaledGemm> shard_gemms_;  // by owner
  int64_t slot_rows_;
  size_t slot_bytes_;      // slots of the staging memory, by source rank
  int tiles_of_slot_ = 0;  // signals of `fused_cutlass`, by source rank
  std::vector<std::unique_ptr<CutlassRsKernel>> cutlass_kernels_;  // by tile; null: not here
  std::unique_ptr<FusedRsKernel> fused_;                           // null: not here
  TileLog timeline_;
  DeviceMemory partial_;  // [m, n]; fused: the send buffer, a slot per owner
  std::shared_ptr<GpuBuffer> staging_;
  DeviceMemory words_;                 // struct Words
  std::optional<ChunkPushes> pushes_;  // for deliveries by the copy engine
  CommonStream side_{Common::side};
  PacedCopies paced_;
  Event begun_, pushed_;
  std::vector<Event> computed_;  // by owner
  std::vector<Candidate> candidates_;
  std::map<std::string, RecordedTiles> recorded_;  // by candidate
};

}  // namespace tandem::gpu
