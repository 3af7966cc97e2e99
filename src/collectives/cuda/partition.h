// Partition of a tensor into one shard per rank, in the form passed to kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "comm/device/device_signal.h"
#include "tandem/collectives.h"

namespace tandem::gpu {

struct Partition {
  const std::byte* in;
  std::byte* out;
  int64_t begins[kMaxGpus + 1];  ///< offset in bytes of each rank's shard
};

/// Partition of a tensor of `rows` rows of `row` bytes.
inline Partition partition_of(int ranks, int64_t rows, int64_t row, const Tensor& in,
                              const Tensor& out) {
  Partition shards{in.as<const std::byte>(), out.as<std::byte>(), {}};
  for (int r = 0; r < ranks; ++r) {
    shards.begins[r + 1] = shards.begins[r] + shard_of(rows, ranks, r).count * row;
  }
  return shards;
}

inline Partition partition_of(int ranks, const Tensor& whole, const Tensor& in, const Tensor& out) {
  const int64_t rows = whole.dim(0);
  return partition_of(ranks, rows, rows == 0 ? 0 : int64_t(whole.bytes()) / rows, in, out);
}

/// 16-byte vectors in the longest shard.
inline int64_t max_vecs(const Partition& shards, int ranks) {
  int64_t bytes = 0;
  for (int r = 0; r < ranks; ++r) bytes = std::max(bytes, shards.begins[r + 1] - shards.begins[r]);
  return (bytes + 15) / 16;
}

/// True if every shard begins and ends at a multiple of 16 bytes: the same on all ranks.
inline bool has_whole_vecs(const Partition& shards, int ranks) {
  int64_t bits = 0;
  for (int r = 0; r <= ranks; ++r) bits |= shards.begins[r];
  return bits % 16 == 0;
}

/// True if in addition this rank's memory is 16-byte aligned.
inline bool is_aligned(const Partition& shards, int ranks) {
  const uintptr_t bits =
      reinterpret_cast<uintptr_t>(shards.in) | reinterpret_cast<uintptr_t>(shards.out);
  return bits % 16 == 0 && has_whole_vecs(shards, ranks);
}

}  // namespace tandem::gpu
