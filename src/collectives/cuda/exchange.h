// One call of the kernels that exchange everything at once, as they are launched.
#pragma once

#include <cstdint>

#include "comm/nccl/device_signal.h"

namespace tandem::gpu {

constexpr int kExchangeThreads = 512;
constexpr int kMaxExchangeBlocks = 64;

struct ExchangeJob {
  PeerTable table;
  Watch watch;
  const void* in;
  void* out;
  int64_t packs;       // 16-byte packs of the tensor
  size_t slot_bytes;   // one rank's slot
  CallCounter* calls;  // a reader is a block
  OpId op = OpId::all_reduce;
};

}  // namespace tandem::gpu
