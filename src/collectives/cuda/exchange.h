// One call of the kernels that exchange everything at once, as they are launched.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/device/line.h"
#include "core/cuda/share.h"

namespace tandem::gpu {

constexpr int kMaxExchangeBlocks = 128;
constexpr int kExchangeThreads = 512, kFewExchangeThreads = 128;  // of a block

/// Of a block, for so many packs of all threads together: as few as kFewBlocks can do with. What
/// the warps of an SM execute takes a small call's time; so do more blocks' signals.
constexpr int exchange_threads(int64_t packs) {
  constexpr int kFewBlocks = 64;
  int threads = kFewExchangeThreads;
  while (threads < kExchangeThreads && packs > kFewBlocks * threads) threads *= 2;
  return threads;
}
/// Blocks wait for the peers' of the same number, so that all are resident.
inline int exchange_blocks(int64_t packs) {
  const int64_t threads = exchange_threads(packs), blocks = (packs + threads - 1) / threads;
  return int(std::clamp<int64_t>(blocks, 1, this_share()->blocks(kMaxExchangeBlocks)));
}

struct ExchangeJob {
  PeerTable table;
  Watch watch;
  const void* in;
  void* out;
  int64_t packs;       // 16-byte packs of the tensor
  size_t slot_bytes;   // one rank's slot
  CallCounter* calls;  // a reader is a block
  OpId op = OpId::all_reduce;
  Line* line = nullptr;  // of an emulated link
};

}  // namespace tandem::gpu
