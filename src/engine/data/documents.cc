#include "engine/data/documents.h"

#include <algorithm>

namespace tandem {
namespace {

/// Begins of documents in [begin, end). Those of empty documents are repeated.
std::span<const int64_t> begins_in(const TokenSource& source, int64_t begin, int64_t end) {
  const std::span<const int64_t> all = source.document_begins();
  const auto documents = all.first(all.empty() ? 0 : all.size() - 1);
  const auto first = std::ranges::lower_bound(documents, begin);
  return {first, std::lower_bound(first, documents.end(), end)};
}

/// Calls `ignore(position)` for each token in [begin, end) that begins a document, once.
template <typename Ignore>
void for_each_ignored(const TokenSource& source, int64_t begin, int64_t end, const Ignore& ignore) {
  if (source.start_token() >= 0) return;
  int64_t before = -1;
  for (const int64_t position : begins_in(source, begin, std::min(end, source.tokens()))) {
    if (position != before) ignore(position);
    before = position;
  }
}

}  // namespace

void find_document_starts(const TokenSource& source, int64_t begin, std::span<int32_t> starts) {
  std::ranges::fill(starts, 0);
  const int64_t end = begin + int64_t(starts.size());
  for (const int64_t position : begins_in(source, begin, end)) {
    const int64_t start = position - begin;
    std::fill(starts.begin() + start, starts.end(), int32_t(start));
  }
}

int64_t count_ignored_targets(const TokenSource& source, int64_t begin, int64_t end) {
  int64_t count = 0;
  for_each_ignored(source, begin, end, [&](int64_t) { ++count; });
  return count;
}

void ignore_targets(const TokenSource& source, int64_t begin, std::span<int32_t> targets) {
  for_each_ignored(source, begin, begin + int64_t(targets.size()),
                   [&](int64_t position) { targets[size_t(position - begin)] = -1; });
}

}  // namespace tandem
