// One persistent GEMM whose tiles wait for the rows they read, chunk by chunk (Hopper). The copy
// engine transfers the rows, or a copy warp of every block does. Few instances exist. Tiles have
// 128 or 256 rows, and a shard must be a multiple of that, except for the any-rows kernels, whose
// shards may end within a tile.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "gemm/cuda/scale.h"
#include "gemm/cuda/tile_log.h"
#include "overlap/ag_gemm/cuda/encoded_route.h"
#include "schedule/ag_tile_order.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// Parameters common to all calls of a rank's operator.
struct FusedAgShape {
  int64_t m, n, k;
  int rank, ranks;
  DType dtype, result;
  std::vector<int> heads;  ///< heads of its calls
  bool weight_kn = false;  ///< the weight is stored [k, n]
};

/// Scales of e4m3 operands.
struct RowScales {
  ScalePointers local;              ///< this rank's rows of x, or all of x, and the weight
  bool by_row = false;              ///< else one scale for each operand
  const float* gathered = nullptr;  ///< by row: remote scales, which arrive before a first chunk
  bool operator==(const RowScales&) const = default;
};

struct FusedAgArgs {
  const void* local;     ///< this rank's rows
  const void* gathered;  ///< [m, k]; receives the remote rows
  const void* weight;    ///< [n, k], or [k, n] with weight_kn
  void* out;             ///< [m, n]
  RowScales scales;      ///< e4m3
  const void* bias;      ///< [n], or null; only any-rows kernels add one
  int head;              ///< columns of the local shard that come first, in 1/8 of all (8: all)
  ShardArrivals arrivals;
  int longer;                   ///< leading sources, whose chunks count one row more
  ShardRoute route;             ///< route of the kernel's copy warps, if any
  TileLog timeline{};           ///< for kernels that record
  EncodedShardRoute encoded{};  ///< instead of `route`, for copy warps that use a wire format
};

/// Whether the parameters prepared for one call of an operator are valid for another.
inline bool is_launched_alike(const FusedAgArgs& a, const FusedAgArgs& b) {
  return a.local == b.local && a.weight == b.weight && a.out == b.out && a.scales == b.scales &&
         a.bias == b.bias && a.longer == b.longer &&
         a.arrivals.counts_per_chunk == b.arrivals.counts_per_chunk &&
         a.arrivals.epoch == b.arrivals.epoch && a.head == b.head &&
         a.arrivals.arrived == b.arrivals.arrived && a.route.targets == b.route.targets &&
         a.route.bytes_per_ns == b.route.bytes_per_ns && a.route.groups == b.route.groups &&
         a.route.first_alone == b.route.first_alone && a.timeline.records == b.timeline.records &&
         a.arrivals.deadline.deadline_ns == b.arrivals.deadline.deadline_ns;
}

/// One tile shape. Host-side launch state is cached and reused while the operands stay the same.
class FusedAgKernel {
 public:
  virtual ~FusedAgKernel() = default;
  virtual void launch(const FusedAgArgs& args, cudaStream_t stream) = 0;
  virtual RecordedTiles recorded_tiles() const = 0;
};

/// Columns of tiles in a head of `head` eighths of them.
constexpr int head_columns(int column_tiles, int head) {
  return (column_tiles * head + 7) / 8;
}

// CUTLASS kernels (fused_kernel.cuh), bf16. Two warpgroups have a tile of 128 x 160 each
// (pingpong), or share one of 256 x 160.
std::unique_ptr<FusedAgKernel> make_fused_ag_128x160(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_fused_ag_256x160(const FusedAgShape& shape);

constexpr int64_t kMinHandWrittenK = 512;
/// Hand-written kernels (arriving_kernel.cuh), bf16 and f16, and e4m3 with tiles of 128 x 128 and a
/// result in either: two blocks of a cluster have tiles with the same columns, in rows that
/// schedule::has_pairs_of_rows pairs; K must be at least kMinHandWrittenK. Throws DeviceError.
std::unique_ptr<FusedAgKernel> make_fused_ag_128x256(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_fused_ag_fp8(const FusedAgShape& shape);
/// Variants for any M with at least one row per rank, and an optional bias.
std::unique_ptr<FusedAgKernel> make_fused_ag_any_rows(const FusedAgShape& shape);
/// Called by the two for bf16 and f16 if the shape has weight_kn, which the others do not support.
std::unique_ptr<FusedAgKernel> make_fused_ag_128x256_kn(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_fused_ag_any_rows_kn(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_fused_ag_fp8_any_rows(const FusedAgShape& shape);
/// Hand-written, bf16, with shards sent in a wire format (encoded_copy_warp.cuh).
std::unique_ptr<FusedAgKernel> make_encoded_ag_int8(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_encoded_ag_int4(const FusedAgShape& shape);
std::unique_ptr<FusedAgKernel> make_encoded_ag_int4_g32(const FusedAgShape& shape);

}  // namespace tandem::gpu
