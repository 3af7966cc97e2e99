// GEMM+RS as one persistent GEMM whose remote tiles are sent in a wire format (Hopper; bf16).
// Differs from gemm_rs/cuda/fused.h in two ways. A warpgroup encodes its f32 accumulators in the
// epilogue, without rounding them first (gemm/cuda/tile_codec.cuh), and a bulk copy sends codes and
// scales to the owner under the next tile's main loop. The owner's local tile decodes received
// slices from shared memory into its accumulators during its main loop. Only the format's bytes are
// sent; no separate kernel encodes or decodes.
//
// The sum is in f32, in the order of gemm_rs/cuda/fused.h. Shards must be whole tiles of rows.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/device/device_signal.h"
#include "overlap/scatter/cuda/rs_shape.h"
#include "tandem/codec.h"

namespace tandem::gpu {

struct EncodedRsArgs {
  const void* x;       ///< [m, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [m / ranks, n]
  /// Received slices as in FusedRsShape, slice_bytes() each, by ring step. Signals start at
  /// `ready_flags` (ready flags), by rank, and `arrived_tiles`, by source, then by slice.
  PeerTable staging;
  int ready_flags, arrived_tiles;
  CallCounter* calls;  ///< counts one reader per block
  bool between;        ///< local tiles are interleaved with remote ones, not last
  Deadline deadline;
};

/// Host-side launch state is cached and reused while the operands stay the same.
class EncodedRsKernel {
 public:
  virtual ~EncodedRsKernel() = default;
  virtual size_t slice_bytes() const = 0;
  /// Whether local tiles may be interleaved with remote ones.
  virtual bool has_between() const = 0;
  virtual void launch(const EncodedRsArgs& args, cudaStream_t stream) = 0;
};

/// Null if no kernel encodes tiles for `wire`, or none adds them for the shape.
std::unique_ptr<EncodedRsKernel> make_encoded_rs_kernel(const Wire& wire,
                                                        const FusedRsShape& shape);

std::unique_ptr<EncodedRsKernel> make_encoded_rs_int8(const FusedRsShape& shape);
std::unique_ptr<EncodedRsKernel> make_encoded_rs_int4(const FusedRsShape& shape);
std::unique_ptr<EncodedRsKernel> make_encoded_rs_int4_g32(const FusedRsShape& shape);

}  // namespace tandem::gpu
