// Causal attention of new tokens over all previous ones of their sequences, for inference. Rotated
// keys and the values of one layer are kept in pages of kPageTokens tokens, which sequences of a
// batch take and return as they grow and end (vLLM, arXiv 2309.06180). The result of a row depends
// on its query and its sequence's keys and values only, bit for bit: not on the batch (unless
// PagedShape::batch_invariant is false), nor on how its prompt was divided into chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rope.h"
#include "tandem/tensor.h"

namespace tandem {

/// Tokens of a page.
constexpr int64_t kPageTokens = 64;

struct PagedShape {
  int64_t heads, kv_heads, head_dim;
  int64_t rows;         ///< max rows of a run
  int64_t max_tokens;   ///< max tokens of a sequence
  int64_t singles = 0;  ///< max rows outside chunks; 0: `rows`. A GPU has scratch for so many
  /// A row's result has the same bits in any batch; false: on a GPU the order of sums may depend on
  /// the number of rows outside chunks and on PagedRows::longest, which is faster.
  bool batch_invariant = true;
  double softcap = 0;  ///< as AttentionShape::softcap
  /// Hopper GPUs, bf16: blocks that share a key head's keys of a row outside chunks, a power of two
  /// up to kMaxCluster; 0: by the rows and the GPU, kNoCluster: kernels of splits. Bits depend on
  /// it.
  int cluster = 0;

  int64_t max_singles() const { return singles > 0 ? singles : rows; }
};

/// Rows of a run outside chunks that are many (PagedShape::batch_invariant).
constexpr int64_t kManySingles = 32;
/// PagedShape::cluster.
constexpr int kMaxCluster = 16, kNoCluster = -1;
/// Head size up to which a GPU has a kernel for chunks, in bf16; else their rows are single.
constexpr int64_t kMaxChunkHead = 128;
/// Whether it has; notes a GPU that has not.
bool has_chunk_kernels(const Exec& exec, DType dtype, int64_t head_dim);

/// Rows [first, first + rows) of a run, tokens of one sequence's prompt.
struct PagedChunk {
  int64_t first, rows;
};

/// Rows of a run, on exec's device. Tokens of a sequence have consecutive rows, in order.
struct PagedRows {
  /// i32 [rows]: the row's line of `pages`; -1: padding, computed as zero outside chunks.
  Tensor sequences;
  Tensor positions;  ///< i32 [rows]: the row's position in its sequence
  /// i32 [sequences, pages of a sequence]: token p of sequence s is in page pages[s][p /
  /// kPageTokens]. Lines need as many valid entries as their tokens take; CPUs read none that is
  /// before the windows of all rows.
  Tensor pages;
  int64_t longest = 0;  ///< positions are below this; 0: below shape.max_tokens
  /// Chunks of prompts, in the order of their rows, up to the last row; other rows come first. A
  /// GPU shares their reads of keys among the rows of a chunk, with other bits than for a row
  /// outside a chunk, but the same in all chunks.
  std::vector<PagedChunk> chunks = {};
  /// Each row outside chunks is the only one of its sequence. A GPU may then write its key and
  /// value in the kernel that attends, with the same bits.
  bool distinct_sequences = false;
};

/// Tensors of a run, as PagedAttention::run takes them, and scratch memory.
struct PagedTensors {
  const Tensor &q, &k, &v, &keys, &values, &out, &sinks;
  Tensor scratch;
};

class PagedAttention {
 public:
  /// rope must outlive this, cover `shape.max_tokens` positions and be on exec's device. `window`:
  /// as AttentionMask::window. Throws Unsupported for a head size or a soft cap that a GPU's
  /// kernels lack.
  PagedAttention(const Exec& exec, const PagedShape& shape, const RopeTable& rope,
                 int64_t window = 0);
  /// Writes the rotated keys and the values of the rows to their pages, then attends. q: [rows,
  /// heads * head_dim], k and v: [rows, kv_heads * head_dim], as projected, f32 or bf16, rows may
  /// be strided; q may be left rotated. keys and values: [pages, kPageTokens, kv_heads, head_dim],
  /// f32, or bf16 if q is. Allocates nothing. `sinks`: f32 [heads], logits of each head's softmax
  /// that have no value, or without dimensions; throws Unsupported for some on a GPU.
  void run(const Exec& exec, const PagedRows& rows, const Tensor& q, const Tensor& k,
           const Tensor& v, const Tensor& keys, const Tensor& values, const Tensor& out,
           const Tensor& sinks = {});

 private:
  PagedShape shape_;
  const RopeTable& rope_;
  int64_t window_;
  int64_t elements_;
  Memory scratch_;  // f32: sums of the rows' splits on a GPU, scratch of each thread on a CPU
};

}  // namespace tandem
