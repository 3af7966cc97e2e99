// What the copy engine does beside adding.h's kernel: every piece of every other shard goes to its
// owner as soon as the kernel says that it is complete. One call after the other takes the same
// buffers, so that it is captured once, whatever the operands are.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>

#include "comm/device/device_signal.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/graph.h"

namespace tandem::gpu {

/// Where pieces are, in every call of an operator.
struct PieceRoute {
  PeerTable staging;
  const std::byte* outbox;  ///< a slot per owner
  size_t slot_bytes;
  int most_pieces;   ///< of a slot: words and signals are by step of the ring and then by these
  int first_signal;  ///< the owner's, which become `sending`
  unsigned* ready;   ///< set by the kernel, and set back
  const uint64_t* sending;
};

class PiecePushes {
 public:
  explicit PiecePushes(const PieceRoute& route) : route_(route) {}
  /// Beside `kernel`, which enqueues it on `stream`, a slot in `pieces` equal ones; `stream` goes
  /// on when all have ended. In a graph that the caller captures, the pushes are branches of it.
  void run(int pieces, cudaStream_t stream, const std::function<void()>& kernel);

 private:
  void enqueue(int pieces);

  PieceRoute route_;
  CommonStream side_{Common::side}, other_side_{Common::other_side};
  Event begun_, pushed_, forked_, joined_;  // the last two between the sides
  std::map<int, Graph> graphs_;             // by pieces
};

}  // namespace tandem::gpu
