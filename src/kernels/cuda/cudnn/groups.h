// Split of a deterministic backward pass into runs of bounded memory.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"

namespace tandem::gpu {

/// Sequences and key heads of one run; they divide those of the shape. Key heads are fewer than the
/// shape's only with one sequence, since cuDNN takes log sums without gaps.
struct AttentionGroup {
  int64_t batch, kv_heads;
};

/// Bytes of score gradients (bf16) that cuDNN keeps for a group to add them in order.
constexpr int64_t score_bytes(const AttentionShape& shape, const AttentionGroup& group) {
  return 2 * group.batch * group.kv_heads * (shape.heads / shape.kv_heads) * shape.seq * shape.seq;
}

/// Largest divisor of `count` below `than`; at least 1.
constexpr int64_t smaller_divisor(int64_t count, int64_t than) {
  for (int64_t each = than - 1; each > 1; --each) {
    if (count % each == 0) return each;
  }
  return 1;
}

/// Next smaller group; the same for one key head of one sequence.
constexpr AttentionGroup smaller_group(const AttentionShape& shape, AttentionGroup group) {
  if (group.batch > 1) {
    group.batch = smaller_divisor(shape.batch, group.batch);
  } else {
    group.kv_heads = smaller_divisor(shape.kv_heads, group.kv_heads);
  }
  return group;
}

/// Whether the log sums of every run start at a multiple of 16 bytes, as cuDNN takes them.
constexpr bool starts_aligned(const AttentionShape& shape, const AttentionGroup& group) {
  const int64_t heads = group.kv_heads * (shape.heads / shape.kv_heads);
  return group.batch * heads * shape.seq % 4 == 0;
}

/// Largest aligned group whose scores need at most `max_bytes`; if there is none, the smallest
/// aligned one, or the whole pass.
constexpr AttentionGroup choose_group(const AttentionShape& shape, int64_t max_bytes) {
  AttentionGroup chosen{shape.batch, shape.kv_heads}, group = chosen;
  while (score_bytes(shape, chosen) > max_bytes && group.batch * group.kv_heads > 1) {
    group = smaller_group(shape, group);
    if (starts_aligned(shape, group)) chosen = group;
  }
  return chosen;
}

}  // namespace tandem::gpu
