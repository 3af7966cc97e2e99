// GEMM+RS as a ring without a sum of its own. An owner's rows go round: the rank to the right of
// the owner computes its part of them, every next one adds the sum that came from its left in its
// own product's epilogue, and the owner adds last. Rows are cut into pieces, so that one crosses
// the wire under the products of the others. The sum is in f32 within a product and rounded to the
// result's dtype where it crosses the wire, as in NCCL's ring; its order is fixed for every owner.
//
// At step 1 <= s <= size a rank computes its part of what rank - s owns; the last step is the own.
#pragma once

#include <vector>

#include "comm/nccl/nccl_communicator.h"
#include "kernels/cuda/gemm_lt.h"
#include "overlap/cuda/dense.h"

namespace tandem::gpu {

class PartialRing {
 public:
  static constexpr int kMostPieces = 4;
  /// Signals that a call uses: of every step, of every piece.
  static constexpr int kSignals = kMaxGpus * kMostPieces;

  /// Where sums arrive: a slot for every step but the last, `slot_bytes` long, in `staging`; its
  /// signals from `signals` on, and one of each peer from `entered` on.
  struct Buffers {
    NcclBuffer& staging;
    size_t slot_bytes;
    int entered, signals;
    const DeviceMemory& partial;  // [m, n]
    uint64_t* epochs;             // of the sending and the multiplying stream
  };

  PartialRing(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape, int pieces);
  PartialRing(PartialRing&&) noexcept = default;
  /// On the communicator's stream.
  void run(const Buffers& buffers, const Tensor& x, const Tensor& weight, const Tensor& out,
           const void* bias);

 private:
  struct Piece {
    int step, index;
    Shard rows;        // of x
    int64_t in_shard;  // its first row there
    LtGemm product;
  };

  size_t bytes_of(int64_t rows) const { return size_t(rows * shape_.n) * size_of(shape_.result()); }
  int signal_of(const Piece& piece) const { return (piece.step - 1) * kMostPieces + piece.index; }
  void send(const Buffers& buffers, const Piece& piece, const std::byte* sum, size_t at);

  NcclCommunicator* comm_;
  DenseShape shape_;
  std::vector<Piece> pieces_;    // in the order of their products
  std::vector<Event> computed_;  // by piece
  // Two streams send by turns: one piece's signal follows it under the next piece.
  Stream sending_[2] = {Stream(Priority::high), Stream(Priority::high)};
  Event begun_, entered_, sent_[2];
};

}  // namespace tandem::gpu
