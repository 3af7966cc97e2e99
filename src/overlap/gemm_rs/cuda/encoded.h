// GEMM+RS as one persistent GEMM whose remote tiles leave in a wire format (Hopper; bf16).
// It is that of adding.h, with two things changed. A warpgroup encodes its accumulators, in f32 and
// never rounded before, as they are, in the epilogue (gemm/cuda/tile_codec.cuh), and a bulk copy
// takes codes and scales to the owner under the next tile's main loop. And what an owner's local
// tile adds under its main loop is decoded from shared memory into the accumulators. Bytes on the
// wire are those of the format; nothing is encoded or decoded by a kernel of its own.
//
// The sum is in f32, in adding.h's order. Shards are whole tiles' rows.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "comm/device/device_signal.h"
#include "overlap/gemm_rs/cuda/adding.h"
#include "tandem/codec.h"

namespace tandem::gpu {

struct EncodedRsJob {
  const void* x;       ///< [m, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [m / ranks, n]
  /// What the others send: by step of the ring, slices as AddingShape has them, slice_bytes()
  /// each. Signals are counted from `entered`, by rank, and `landed`, by source and then by slice.
  PeerTable staging;
  int entered, landed;
  CallCounter* calls;  ///< a reader is a block
  bool between;        ///< AddingPlan's
  Watch watch;
};

/// Host-side launch state is kept and reused while the operands stay the same.
class EncodedRsKernel {
 public:
  virtual ~EncodedRsKernel() = default;
  virtual size_t slice_bytes() const = 0;
  /// Whether local tiles may come between remote ones.
  virtual bool has_between() const = 0;
  virtual void launch(const EncodedRsJob& job, cudaStream_t stream) = 0;
};

/// None where `wire` has no kernel that encodes tiles, or the shape none that adds them.
std::unique_ptr<EncodedRsKernel> make_encoded_rs_kernel(const Wire& wire, const AddingShape& shape);

std::unique_ptr<EncodedRsKernel> make_encoded_rs_int8(const AddingShape& shape);
std::unique_ptr<EncodedRsKernel> make_encoded_rs_int4(const AddingShape& shape);
std::unique_ptr<EncodedRsKernel> make_encoded_rs_int4_g32(const AddingShape& shape);

}  // namespace tandem::gpu
