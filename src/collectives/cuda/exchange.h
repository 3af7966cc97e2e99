// Launch parameters of kernels that exchange all data at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/device/link_pacer.h"
#include "core/cuda/share.h"

namespace tandem::gpu {

constexpr int kMaxExchangeBlocks = 128;
constexpr int kExchangeThreads = 512, kFewExchangeThreads = 128;  // per block

/// Threads per block for `vecs` 16-byte vectors in total: the fewest with which kFewBlocks suffice.
/// Small calls are bound by the instructions of an SM's warps, and by the signals of additional
/// blocks.
constexpr int exchange_threads(int64_t vecs) {
  constexpr int kFewBlocks = 64;
  int threads = kFewExchangeThreads;
  while (threads < kExchangeThreads && vecs > kFewBlocks * threads) threads *= 2;
  return threads;
}
/// Blocks wait for the peers' blocks of the same index, so all must be resident.
inline int exchange_blocks(int64_t vecs) {
  const int64_t threads = exchange_threads(vecs), blocks = (vecs + threads - 1) / threads;
  return int(std::clamp<int64_t>(blocks, 1, this_share()->blocks(kMaxExchangeBlocks)));
}

struct ExchangeParams {
  PeerTable table;
  Deadline deadline;
  const void* in;
  void* out;
  int64_t vecs;        // 16-byte vectors of the tensor
  size_t slot_bytes;   // one rank's slot
  CallCounter* calls;  // its readers are blocks
  OpId op = OpId::all_reduce;
  LinkPacer* link_pacer = nullptr;  // emulated link, or null
};

}  // namespace tandem::gpu
