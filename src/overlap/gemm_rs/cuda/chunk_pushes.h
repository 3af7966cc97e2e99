// Copy-engine pushes concurrent with fused.h's kernel: every chunk of every remote shard is sent
// to its owner as soon as the kernel marks it complete. Successive calls use the same buffers, so
// the pushes are captured once, independent of the operands.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <map>

#include "comm/device/device_signal.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/graph.h"

namespace tandem::gpu {

/// Buffers and signals of the chunks, fixed for all calls of an operator.
struct ChunkRoute {
  PeerTable staging;
  const std::byte* send_buffer;  ///< a slot per owner
  size_t slot_bytes;
  int max_chunks;    ///< max per slot: flags and signals are indexed by ring step, then by chunk
  int first_signal;  ///< first of the owner's signals, which are set to `sending`
  unsigned* ready;   ///< set by the kernel, reset by the pushing stream
  const uint64_t* sending;
};

class ChunkPushes {
 public:
  explicit ChunkPushes(const ChunkRoute& route) : route_(route) {}
  /// Enqueues `kernel` on `stream` and pushes each slot concurrently in `chunks` equal chunks;
  /// later work on `stream` waits for all of them. In a graph captured by the caller, the pushes
  /// are branches of it.
  void run(int chunks, cudaStream_t stream, const std::function<void()>& kernel);

 private:
  void enqueue(int chunks);

  ChunkRoute route_;
  CommonStream side_{Common::side}, other_side_{Common::other_side};
  Event begun_, pushed_, forked_, joined_;  // the last two between the side streams
  std::map<int, Graph> graphs_;             // by number of chunks
};

}  // namespace tandem::gpu
