#include "engine/data/scored_windows.h"

#include <algorithm>
#include <utility>

#include "engine/data/text/documents.h"

namespace tandem {

int64_t count_windows(int64_t positions, int64_t seq, int64_t stride) {
  if (positions <= 0) return 0;
  return positions <= seq ? 1 : 1 + (positions - seq + stride - 1) / stride;
}

void ScoredWindows::set_count(int64_t all, int64_t positions, int64_t stride, int64_t max) {
  all_ = count_ = all;
  if (max > 0 && positions > max) count_ = std::clamp<int64_t>(max / stride, 1, all);
}

StreamWindows::StreamWindows(std::shared_ptr<const TokenSource> stream, int64_t seq, int64_t stride,
                             int64_t max_tokens, bool document_mask)
    : stream_(std::move(stream)), seq_(seq), stride_(stride), document_mask_(document_mask) {
  const int64_t positions = stream_->tokens() - 1;
  set_count(count_windows(positions, seq, stride), positions, stride, max_tokens);
}

ScoredWindow StreamWindows::read(int64_t index) const {
  const int64_t begin = window(index) * stride_;
  const int64_t positions = std::min(seq_, stream_->tokens() - 1 - begin);
  std::vector<int32_t> stream(size_t(positions) + 1);
  stream_->read(begin, stream);
  ScoredWindow result{{stream.begin(), stream.end() - 1}, {stream.begin() + 1, stream.end()}};
  const int64_t context = begin > 0 ? seq_ - stride_ : 0;
  std::fill_n(result.targets.begin(), std::min(context, positions), -1);
  if (!document_mask_) return result;
  result.document_starts.resize(result.tokens.size());
  find_document_starts(*stream_, begin, result.document_starts);
  ignore_targets(*stream_, begin + 1, result.targets);
  return result;
}

PackedWindows::PackedWindows(std::shared_ptr<const TokenSource> stream, int64_t seq,
                             int64_t max_tokens)
    : stream_(std::move(stream)), seq_(seq), packing_(share_packing(*stream_, seq)) {
  set_count(packing_->sequences(), packing_->predictions(), seq, max_tokens);
}

ScoredWindow PackedWindows::read(int64_t index) const {
  const auto size = size_t(seq_);
  ScoredWindow result{std::vector<int32_t>(size), std::vector<int32_t>(size),
                      std::vector<int32_t>(size)};
  packing_->read(window(index), result.tokens, result.targets, result.document_starts);
  return result;
}

}  // namespace tandem
