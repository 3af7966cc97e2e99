// The product of an owner's rows that adds the parts which the other ranks sent (Hopper, bf16), for
// GEMM+RS: no kernel of its own sums them. A part is one more operand of the tensor cores: the
// identity times 64 of its rows is a step like those along K, so parts come through the pipeline
// that brings x and the weight, spread over all of a tile's product. The sum is in f32, in an order
// that is fixed: what the product has so far, then the next 64 rows of a part, source by source.
//
// Zero times infinity is not a number, and the identity has 63 zeros for each of 64 rows: a value
// of a part that is not finite makes its column NaN in all of them. So this is for finite values.
//
// Sources are in the order in which their parts arrive. A part may come in pieces, each with a
// signal, and tiles take the rows in that order.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "comm/nccl/device_signal.h"

namespace tandem::gpu {

struct AddingJob {
  int64_t rows, n, k;
  const void* x;       ///< [rows, k]
  const void* weight;  ///< [n, k]
  void* out;           ///< [rows, n]
  const void* parts;   ///< [sources, rows, n], by source
  int sources, rank;
  int pieces;               ///< that a part comes in
  const uint64_t* arrived;  ///< of every source, of each of up to kMostPieces pieces
  const uint64_t* epoch;    ///< that `arrived` must have reached, on the device
  Watch watch;
};

/// Host-side launch state is kept and reused while the operands stay the same.
class AddingKernel {
 public:
  /// A shard must be a multiple of these rows, and so must be each of its pieces.
  static constexpr int kRows = 256;
  static constexpr int kMostPieces = 2;
  /// So that every part has a step along K before it.
  static constexpr int64_t kLeastK = 1024;

  virtual ~AddingKernel() = default;
  virtual void launch(const AddingJob& job, cudaStream_t stream) = 0;
};

std::unique_ptr<AddingKernel> make_adding_128x256();

}  // namespace tandem::gpu
