#include "engine/data/text/documents.h"

#include <algorithm>

namespace tandem {
namespace {

/// Positions that are in [begin, end). Begins of empty documents are repeated.
std::span<const int64_t> positions_in(std::span<const int64_t> positions, int64_t begin,
                                      int64_t end) {
  const auto first = std::ranges::lower_bound(positions, begin);
  return {first, std::lower_bound(first, positions.end(), end)};
}

/// Calls `ignore(position)` for each token in [begin, end) outside of the scored spans, once.
template <typename Ignore>
void for_each_unscored(std::span<const int64_t> spans, int64_t begin, int64_t end,
                       const Ignore& ignore) {
  if (spans.empty()) return;
  auto next = std::ranges::upper_bound(spans, begin);  // an end within a span
  for (int64_t position = begin; position < end; ++position) {
    while (next != spans.end() && *next <= position) ++next;
    if ((next - spans.begin()) % 2 == 0) ignore(position);
  }
}

/// Calls `ignore(position)` for each token in [begin, end) that no loss is taken on, once: without
/// scored spans, those that begin a document.
template <typename Ignore>
void for_each_ignored(const TokenSource& source, int64_t begin, int64_t end, const Ignore& ignore) {
  int64_t before = -1;
  end = std::min(end, source.tokens());
  if (const auto spans = source.scored_spans(); !spans.empty()) {
    return for_each_unscored(spans, begin, end, ignore);
  }
  for (const int64_t position : positions_in(source.unpredicted_begins(), begin, end)) {
    if (position != before) ignore(position);
    before = position;
  }
}

}  // namespace

void find_document_starts(const TokenSource& source, int64_t begin, std::span<int32_t> starts) {
  std::ranges::fill(starts, 0);
  const int64_t end = begin + int64_t(starts.size());
  const std::span<const int64_t> all = source.document_begins();
  const auto documents = all.first(all.empty() ? 0 : all.size() - 1);
  for (const int64_t position : positions_in(documents, begin, end)) {
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

int64_t count_scored(const TokenSource& source, int64_t begin, int64_t end) {
  int64_t count = end - begin;
  for_each_unscored(source.scored_spans(), begin, end, [&](int64_t) { --count; });
  return count;
}

void ignore_unscored(const TokenSource& source, int64_t begin, std::span<int32_t> targets) {
  for_each_unscored(source.scored_spans(), begin, begin + int64_t(targets.size()),
                    [&](int64_t position) { targets[size_t(position - begin)] = -1; });
}

}  // namespace tandem
