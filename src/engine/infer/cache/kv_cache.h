// Keys and values of a rank's layers, in pages that sequences share
// (kernels/attention/paged_attention.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/model/layout.h"
#include "engine/model/rotary.h"
#include "engine/model/views.h"
#include "kernels/attention/paged_attention.h"

namespace tandem {

/// Pages that `tokens` tokens of a sequence take.
constexpr int64_t pages_of(int64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

/// Max pages of the tokens that `rows` consecutive rows read, each with its window.
constexpr int64_t window_pages(int64_t window, int64_t rows) {
  return pages_of(window + rows - 2) + 1;
}

class KvCache {
 public:
  struct Size {
    int64_t pages;                ///< of each layer
    int64_t sequences;            ///< max sequences of a run
    int64_t rows;                 ///< max rows of a run
    int64_t max_tokens;           ///< max tokens of a sequence
    int64_t singles = 0;          ///< max rows of a run outside chunks; 0: `rows`
    bool batch_invariant = true;  ///< as in PagedShape
  };
  /// Keys and values of a layer.
  struct Layer {
    Memory memory;
    Tensor keys, values;  ///< [pages, kPageTokens, kv_heads, head_dim]
    PagedAttention* attention;
  };

  /// Bytes of memory of the keys and values of such a cache.
  static double bytes(const ModelLayout& layout, DType dtype, const Size& size);
  /// rope must outlive this and cover size.max_tokens positions.
  KvCache(const Exec& exec, const ModelConfig& config, const ModelLayout& layout,
          const RopeTables& rope, DType dtype, const Size& size);

  /// Sets the rows of the next run, as PagedRows has them: row i is token positions[i] of the
  /// sequence with line sequences[i] of `pages`, [.., pages_of(size.max_tokens)].
  void set_rows(std::span<const int32_t> sequences, std::span<const int32_t> positions,
                std::span<const int32_t> pages, std::vector<PagedChunk> chunks = {});
  /// Tokens [position, position + count) of the only sequence, in pages 0, 1, ...
  void set_rows(int64_t position, int64_t count);
  /// Attention of a branch: rows [first, first + out.dim(0)) of the run, those of q, k, v and out.
  /// `sinks`: as in PagedAttention::run.
  void attend(size_t branch, int64_t first, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor& out, const Tensor& sinks = {});
  int64_t max_tokens() const { return size_.max_tokens; }
  int64_t num_pages() const { return size_.pages; }
  /// Bound of the tokens of the next run's sequences. `attend` enqueues the same work for runs of
  /// as many rows with an equal bound, equal distinct_sequences() and no chunks.
  int64_t longest() const { return rows_.longest; }
  /// PagedRows::distinct_sequences of the next run.
  bool distinct_sequences() const { return rows_.distinct_sequences; }
  /// Layer of a branch, which has attention.
  const Layer& layer(size_t branch) const { return layers_[branch]; }

 private:
  Exec exec_;
  Size size_;
  /// By window and rotation.
  std::map<std::pair<int64_t, program::Rotation>, std::unique_ptr<PagedAttention>> attentions_;
  std::vector<Layer> layers_;  // by branch, empty without attention
  Activation inputs_;  ///< [sequences of rows | positions of rows | pages], each of max size
  Upload upload_;
  std::vector<int32_t> host_inputs_;
  PagedRows rows_;
};

}  // namespace tandem
