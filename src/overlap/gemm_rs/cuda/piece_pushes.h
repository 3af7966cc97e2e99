// What the copy engine does beside adding.h's kernel: every piece of every other shard goes to its
// owner as soon as the kernel says that it is complete. One call after the other takes the same
// buffers, so that it is captured once, whatever the operands are.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <optional>

#include "comm/nccl/device_signal.h"
#include "core/cuda/graph.h"
#include "core/cuda/handles.h"

namespace tandem::gpu {

/// Where pieces are, of every call: those of one operator.
struct PieceRoute {
  PeerTable staging;
  const std::byte* outbox;  ///< a slot per owner
  size_t slot_bytes;        ///< whose pieces are equal
  int pieces, most_pieces;  ///< of a slot; words and signals are by ring step and then by the most
  int first_signal;         ///< the owner's, which becomes `sending`
  unsigned* ready;          ///< by the kernel; set back
  const uint64_t* sending;
};

class PiecePushes {
 public:
  explicit PiecePushes(const PieceRoute& route) : route_(route) {}
  /// Beside `kernel`, which enqueues it on `stream`; `stream` goes on when both have ended. In a
  /// graph that the caller captures, the pushes are branches of it.
  void run(cudaStream_t stream, const std::function<void()>& kernel);

 private:
  void enqueue();

  PieceRoute route_;
  Stream side_{Priority::high}, other_side_{Priority::high};
  Event begun_, pushed_, forked_, joined_;  // the last two between the sides
  std::optional<Graph> graph_;
};

}  // namespace tandem::gpu
