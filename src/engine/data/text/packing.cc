#include "engine/data/text/packing.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "engine/data/text/documents.h"

namespace tandem {
namespace {

/// In the order of the stream.
std::vector<DocumentSlice> cut_documents(const TokenSource& source, int64_t seq) {
  const std::span<const int64_t> begins = source.document_begins();
  const bool has_end = source.start_token() >= 0;
  std::vector<DocumentSlice> slices;
  for (size_t i = 0; i + 1 < begins.size(); ++i) {
    const int64_t tokens = begins[i + 1] - begins[i];
    const int64_t predictions = tokens > 0 && has_end ? tokens : tokens - 1;
    for (int64_t at = 0; at < predictions; at += seq) {
      const int64_t count = std::min(seq, predictions - at);
      slices.push_back({begins[i] + at, int32_t(count), has_end && at + count == predictions});
    }
  }
  return slices;
}

}  // namespace

Packing::Packing(const TokenSource& source, int64_t seq) : source_(&source), seq_(seq) {
  std::vector<DocumentSlice> slices = cut_documents(source, seq);
  std::ranges::stable_sort(slices, std::ranges::greater(), &DocumentSlice::count);
  for (const DocumentSlice& slice : slices) predictions_ += slice.count;
  fill_sequences(slices);
}

/// `slices`: the longest first.
void Packing::fill_sequences(std::span<const DocumentSlice> slices) {
  std::vector<int64_t> sequence_of(slices.size());
  std::map<int64_t, std::vector<int64_t>> with_room;  // sequences by their room, above 0
  int64_t sequences = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto best = with_room.lower_bound(slices[i].count);
    int64_t room = seq_, sequence = sequences;
    if (best == with_room.end()) {
      ++sequences;
    } else {
      room = best->first;
      sequence = best->second.back();
      best->second.pop_back();
      if (best->second.empty()) with_room.erase(best);
    }
    sequence_of[i] = sequence;
    room -= slices[i].count;
    if (room > 0) with_room[room].push_back(sequence);
  }
  first_slice_.resize(size_t(sequences) + 1);
  for (const int64_t sequence : sequence_of) ++first_slice_[size_t(sequence) + 1];
  std::partial_sum(first_slice_.begin(), first_slice_.end(), first_slice_.begin());
  slices_.resize(slices.size());
  std::vector<int64_t> next(first_slice_.begin(), first_slice_.end() - 1);
  for (size_t i = 0; i < slices.size(); ++i) {
    slices_[size_t(next[size_t(sequence_of[i])]++)] = slices[i];
  }
}

std::span<const DocumentSlice> Packing::slices(int64_t sequence) const {
  const int64_t first = first_slice_[size_t(sequence)], end = first_slice_[size_t(sequence) + 1];
  return std::span(slices_).subspan(size_t(first), size_t(end - first));
}

std::shared_ptr<const Packing> share_packing(const TokenSource& source, int64_t seq) {
  static std::mutex mutex;
  static std::map<std::pair<const TokenSource*, int64_t>, std::weak_ptr<const Packing>> known;
  const std::lock_guard lock(mutex);
  std::erase_if(known, [](const auto& packing) { return packing.second.expired(); });
  std::weak_ptr<const Packing>& shared = known[{&source, seq}];
  if (auto packing = shared.lock()) return packing;
  auto packing = std::make_shared<const Packing>(source, seq);
  shared = packing;
  return packing;
}

int64_t Packing::targets(int64_t sequence) const {
  int64_t targets = 0;
  for (const DocumentSlice& slice : slices(sequence)) {
    targets += count_scored(*source_, slice.begin + 1, slice.begin + 1 + slice.count);
  }
  return targets;
}

void Packing::read(int64_t sequence, std::span<int32_t> tokens, std::span<int32_t> targets,
                   std::span<int32_t> document_starts) const {
  size_t filled = 0;
  std::vector<int32_t> stream;
  for (const DocumentSlice& slice : slices(sequence)) {
    const auto count = size_t(slice.count);
    stream.resize(count + (slice.ends ? 0 : 1));
    source_->read(slice.begin, stream);
    if (slice.ends) stream.push_back(source_->start_token());
    std::copy_n(stream.begin(), count, tokens.begin() + long(filled));
    std::copy_n(stream.begin() + 1, count, targets.begin() + long(filled));
    ignore_unscored(*source_, slice.begin + 1, targets.subspan(filled, count));
    if (!document_starts.empty()) {
      std::ranges::fill(document_starts.subspan(filled, count), int32_t(filled));
    }
    filled += count;
  }
  std::ranges::fill(tokens.subspan(filled), -1);
  std::ranges::fill(targets.subspan(filled), -1);
  if (!document_starts.empty()) {
    std::ranges::fill(document_starts.subspan(filled), int32_t(filled));
  }
}

}  // namespace tandem
