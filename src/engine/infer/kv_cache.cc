#include "engine/infer/kv_cache.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tandem {

KvCache::KvCache(const Exec& exec, const ModelConfig& config, const ModelLayout& layout,
                 const RopeTable& rope, DType dtype, const Size& size)
    : exec_(exec),
      size_(size),
      sequences_(DType::i32, 1, size.rows, exec.device),
      positions_(DType::i32, 1, size.rows, exec.device),
      pages_(DType::i32, size.sequences, pages_of(size.max_tokens), exec.device),
      upload_sequences_(exec, sequences_->bytes()),
      upload_positions_(exec, positions_->bytes()),
      upload_pages_(exec, pages_->bytes()) {
  const bool has_chunks = dtype == DType::bf16 && config.head_dim <= kMaxChunkHead;
  const PagedShape shape{layout.heads, layout.kv_heads, config.head_dim,
                         size.rows,    size.max_tokens, has_chunks ? size.singles : 0};
  const auto attention_with = [&](int64_t window) {
    const auto found = std::ranges::find(attentions_, window, [](auto& a) { return a.first; });
    if (found != attentions_.end()) return found->second.get();
    attentions_.emplace_back(window, std::make_unique<PagedAttention>(exec, shape, rope, window));
    return attentions_.back().second.get();
  };
  for (const BranchLayout& b : layout.branches) {
    Layer layer{};
    if (b.attention) {
      const std::initializer_list<int64_t> dims{size.pages, kPageTokens, layout.kv_heads,
                                                config.head_dim};
      const auto bytes = size_t(size.pages * kPageTokens * layout.kv) * size_of(dtype);
      layer.memory = Memory(2 * bytes, exec.device);
      layer.keys = layer.memory.view(dtype, dims);
      layer.values = layer.memory.view(dtype, dims, bytes);
      layer.attention = attention_with(b.window);
    }
    layers_.push_back(std::move(layer));
  }
}

void KvCache::set_rows(std::span<const int32_t> sequences, std::span<const int32_t> positions,
                       std::span<const int32_t> pages, std::vector<PagedChunk> chunks) {
  const auto rows = int64_t(sequences.size()), line = pages_->dim(1);
  const auto lines = int64_t(pages.size()) / line;
  const auto first = [](const Activation& all, int64_t count) {
    return Tensor(all->data(), DType::i32, {count}, all->device());
  };
  rows_ = {first(sequences_, rows), first(positions_, rows), pages_->rows(0, lines),
           std::ranges::max(positions) + 1, std::move(chunks)};
  upload_sequences_.run(exec_, Tensor::of(sequences, {rows}), rows_.sequences);
  upload_positions_.run(exec_, Tensor::of(positions, {rows}), rows_.positions);
  upload_pages_.run(exec_, Tensor::of(pages, {lines, line}), rows_.pages);
}

void KvCache::set_rows(int64_t position, int64_t count) {
  std::vector<int32_t> positions(static_cast<size_t>(count)), pages(size_t(pages_->dim(1)));
  std::iota(positions.begin(), positions.end(), int32_t(position));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<PagedChunk> chunks;
  if (count > 1) chunks.push_back({0, count});
  set_rows(std::vector<int32_t>(positions.size(), 0), positions, pages, std::move(chunks));
}

void KvCache::attend(size_t branch, int64_t first, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor& out) {
  const Layer& layer = layers_[branch];
  const int64_t count = out.dim(0);
  PagedRows rows{rows_.sequences.narrow(0, first, count), rows_.positions.narrow(0, first, count),
                 rows_.pages, rows_.longest};
  for (const PagedChunk& chunk : rows_.chunks) {
    const int64_t begin = std::max(chunk.first, first) - first;
    const int64_t end = std::min(chunk.first + chunk.rows - first, count);
    if (begin < end) rows.chunks.push_back({begin, end - begin});
  }
  layer.attention->run(exec_, rows, q, k, v, layer.keys, layer.values, out);
}

}  // namespace tandem
