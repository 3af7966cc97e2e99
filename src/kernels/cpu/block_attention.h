// Attention between the queries of one context-parallel rank and the keys of another, on the
// calling thread's CPU threads: forward to a partial result with its log-sum, backward from the
// global log-sum. Queries and keys are rotated before. Query head h reads key/value head
// h / (heads / kv_heads).
//
// A result has the same bits wherever its block is computed: partial results and gradients are
// functions of the block only, and are added to what they are given in f32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "schedule/context.h"
#include "tandem/tensor.h"

namespace tandem::cpu {

/// Rows of `batch` sequences: [batch x head.count, columns] and [batch x tail.count, columns] of
/// ContextRows.
struct ChunkRows {
  Tensor head, tail;
};

struct BlockShape {
  int64_t batch, heads, kv_heads, head_dim;
  int64_t max_keys;    ///< of one sequence in a block
  double softcap = 0;  ///< as AttentionShape::softcap
};

struct AttentionBlock {
  schedule::ContextBlock rows;
  schedule::ContextMask mask;
  /// Document starts as in AttentionMask, of whole sequences of `seq` positions; nullptr: one
  /// document each.
  const int32_t* document_starts;
  int64_t seq;
  ChunkRows q, k, v;  ///< f32 or bf16, one dtype
};

/// `out` [columns] of softmax with the log-sum of exponentials `log_sum` <- the same over their
/// keys and those of `partial`. A log-sum of -infinity means no keys.
void merge_partial(float* out, float& log_sum, const float* partial, float partial_log_sum,
                   int64_t columns);

class BlockAttention {
 public:
  explicit BlockAttention(const BlockShape& shape);
  ~BlockAttention();
  /// Bytes that it allocates, with the calling thread's number of CPU threads.
  static size_t bytes(const BlockShape& shape);
  /// Merges the block's result into `out`, f32 [.., heads x head_dim], and `log_sums`, f32 [..,
  /// heads], at first 0 and -infinity.
  void forward(const AttentionBlock& block, const ChunkRows& out, const ChunkRows& log_sums);

  struct Gradients {
    ChunkRows dout;             ///< the dtype of q
    ChunkRows log_sums, delta;  ///< f32 [.., heads], over all keys; delta: dot(dout, out)
    ChunkRows dq, dk, dv;       ///< f32, added to
  };
  void backward(const AttentionBlock& block, const Gradients& gradients);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::cpu
