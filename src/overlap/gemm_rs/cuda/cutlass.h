// One persistent CUTLASS GEMM whose remote tiles are sent to their owner as they finish, and whose
// local tiles add the peers' partials before they are stored (Hopper; bf16 and f16). Few instances
// exist. Tiles have 128 rows; a shard must be a multiple of 128, or of 256 if tiles are computed in
// pairs of rows.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/device/device_signal.h"
#include "gemm/cuda/tile_log.h"
#include "overlap/contract/cuda/link_rates.h"
#include "schedule/rs_tile_order.h"

namespace tandem::gpu {

struct CutlassRsArgs {
  int64_t m, n, k;
  const void* x;       ///< [m, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [m / ranks, n]
  /// Symmetric staging memory, a slot per source rank; signals start at `ready_flags` (ready
  /// flags), by source, and `arrived_tiles`, by source, then by tile.
  PeerTable staging;
  std::byte* send_buffer;  ///< the local send buffer, a slot per owner
  size_t slot_bytes;
  int ready_flags, arrived_tiles, tiles_of_slot;
  CallCounter* calls;  ///< counts one reader per tile
  int pace;            ///< send rate in percent of the link; 0: unpaced
  Deadline deadline;
  TileLog timeline{};  ///< for kernels that record
};

/// One tile shape. Host-side launch state is cached and reused while the operands stay the same.
class CutlassRsKernel {
 public:
  virtual ~CutlassRsKernel() = default;
  virtual void launch(const CutlassRsArgs& args, cudaStream_t stream) = 0;
  virtual RecordedTiles recorded_tiles(int64_t m, int64_t n) const = 0;
  /// Tiles in a slot of a shard with these rows.
  virtual int tiles(int64_t shard_rows, int64_t columns) const = 0;
  virtual size_t tile_bytes() const = 0;
};

std::unique_ptr<CutlassRsKernel> make_cutlass_rs_128x128();  // sends from registers
std::unique_ptr<CutlassRsKernel> make_cutlass_rs_128x256();  // pairs of rows
std::unique_ptr<CutlassRsKernel> make_cutlass_rs_f16();      // 128x256

}  // namespace tandem::gpu
