#include "engine/infer/cache/kv_cache.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace tandem {
namespace {

/// Bound of the tokens of a run's sequences of which there are few, so that runs are alike (see
/// Replay): at most an eighth above `tokens`, or 256.
int64_t round_up_longest(int64_t tokens, int64_t max_tokens) {
  const int64_t unit = std::max<int64_t>(256, int64_t(std::bit_ceil(uint64_t(tokens))) / 16);
  return std::min(max_tokens, (tokens + unit - 1) / unit * unit);
}

/// Value of PagedRows::distinct_sequences. Rows of a sequence are neighbors.
bool are_distinct(std::span<const int32_t> sequences, const std::vector<PagedChunk>& chunks) {
  if (!chunks.empty()) sequences = sequences.first(size_t(chunks.front().first) + 1);
  const auto is_same = [](int32_t a, int32_t b) { return a == b && a >= 0; };
  return std::ranges::adjacent_find(sequences, is_same) == sequences.end();
}

/// Bytes of a layer's keys, and of its values.
size_t bytes_of_keys(const ModelLayout& layout, DType dtype, const KvCache::Size& size) {
  return size_t(size.pages * kPageTokens * layout.kv) * size_of(dtype);
}

}  // namespace

double KvCache::bytes(const ModelLayout& layout, DType dtype, const Size& size) {
  const auto layers = std::ranges::count_if(
      layout.branches, [](const BranchLayout& branch) { return branch.attention; });
  return 2 * double(layers) * double(bytes_of_keys(layout, dtype, size));
}

KvCache::KvCache(const Exec& exec, const ModelConfig& config, const ModelLayout& layout,
                 const RopeTables& rope, DType dtype, const Size& size)
    : exec_(exec),
      size_(size),
      inputs_(DType::i32, 1, 2 * size.rows + size.sequences * pages_of(size.max_tokens),
              exec.device),
      upload_(exec, inputs_->bytes()),
      host_inputs_(size_t(inputs_->elements())) {
  const bool has_chunks = has_chunk_kernels(exec, dtype, config.head_dim);
  const PagedShape shape{layout.heads,         layout.kv_heads,
                         config.head_dim,      size.rows,
                         size.max_tokens,      has_chunks ? size.singles : 0,
                         size.batch_invariant, config.attention_softcap};
  const auto attention_of = [&](const program::Op& op) {
    auto& found = attentions_[{op.window, op.rotation}];
    if (!found) {
      found = std::make_unique<PagedAttention>(exec, shape, rope.of(op.rotation), op.window);
    }
    return found.get();
  };
  for (const BranchLayout& b : layout.branches) {
    Layer layer{};
    if (b.attention) {
      const std::initializer_list<int64_t> dims{size.pages, kPageTokens, layout.kv_heads,
                                                config.head_dim};
      const size_t bytes = bytes_of_keys(layout, dtype, size);
      layer.memory = Memory(2 * bytes, exec.device);
      layer.keys = layer.memory.view(dtype, dims);
      layer.values = layer.memory.view(dtype, dims, bytes);
      layer.attention = attention_of(*b.program.find(program::kAttention));
    }
    layers_.push_back(std::move(layer));
  }
}

void KvCache::set_rows(std::span<const int32_t> sequences, std::span<const int32_t> positions,
                       std::span<const int32_t> pages, std::vector<PagedChunk> chunks) {
  const auto rows = int64_t(sequences.size()), line = pages_of(size_.max_tokens);
  const auto count = int64_t(pages.size()), first_page = 2 * size_.rows;
  std::ranges::copy(sequences, host_inputs_.begin());
  std::ranges::copy(positions, host_inputs_.begin() + size_.rows);
  std::ranges::copy(pages, host_inputs_.begin() + first_page);
  const Tensor all(inputs_->data(), DType::i32, {inputs_->elements()}, exec_.device);
  const int64_t used = first_page + count;
  upload_.run(exec_, Tensor::of(std::span(host_inputs_).first(size_t(used)), {used}),
              all.narrow(0, 0, used));
  const Tensor of_pages = all.narrow(0, first_page, count);
  const bool is_distinct = are_distinct(sequences, chunks);
  rows_ = {all.narrow(0, 0, rows),
           all.narrow(0, size_.rows, rows),
           Tensor(of_pages.data(), DType::i32, {count / line, line}, exec_.device),
           round_up_longest(std::ranges::max(positions) + 1, size_.max_tokens),
           std::move(chunks),
           is_distinct};
}

void KvCache::set_rows(int64_t position, int64_t count) {
  std::vector<int32_t> positions(static_cast<size_t>(count)),
      pages(size_t(pages_of(size_.max_tokens)));
  std::iota(positions.begin(), positions.end(), int32_t(position));
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<PagedChunk> chunks;
  if (count > 1) chunks.push_back({0, count});
  set_rows(std::vector<int32_t>(positions.size(), 0), positions, pages, std::move(chunks));
}

void KvCache::attend(size_t branch, int64_t first, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor& out, const Tensor& sinks) {
  const Layer& layer = layers_[branch];
  const int64_t count = out.dim(0);
  PagedRows rows{rows_.sequences.narrow(0, first, count), rows_.positions.narrow(0, first, count),
                 rows_.pages, rows_.longest};
  for (const PagedChunk& chunk : rows_.chunks) {
    const int64_t begin = std::max(chunk.first, first) - first;
    const int64_t end = std::min(chunk.first + chunk.rows - first, count);
    if (begin < end) rows.chunks.push_back({begin, end - begin});
  }
  rows.distinct_sequences = rows_.distinct_sequences;
  layer.attention->run(exec_, rows, q, k, v, layer.keys, layer.values, out, sinks);
}

}  // namespace tandem
