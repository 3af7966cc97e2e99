#include "comm/workspace.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

constexpr size_t kPairHeader = 64;
constexpr size_t kUseCount = 64;
constexpr size_t kStagingPerStream = size_t(8) << 20;
constexpr size_t kLargestSlot = size_t(256) << 10;
constexpr size_t kSmallestSlot = size_t(4) << 10;

}  // namespace

WorkspaceLayout WorkspaceLayout::of(int ranks) {
  constexpr int kSlots = 4;
  const size_t share = kStagingPerStream / size_t(ranks) / kSlots / 4096 * 4096;
  return {ranks, kSlots, std::clamp(share, kSmallestSlot, kLargestSlot), 4096 + 32 * size_t(ranks)};
}

size_t WorkspaceLayout::envelope_at(int source, uint64_t call) const {
  return ((call & 1) * size_t(ranks) + size_t(source)) * envelope_bytes;
}

size_t WorkspaceLayout::slot_at(Stream stream, int source, uint64_t chunk) const {
  const size_t stride = slot_bytes + kPairHeader;
  const size_t index =
      (size_t(stream) * size_t(ranks) + size_t(source)) * size_t(slots) + chunk % uint64_t(slots);
  return 2 * size_t(ranks) * envelope_bytes + index * stride + kPairHeader;
}

size_t WorkspaceLayout::pair_header_at(int source, uint64_t chunk) const {
  return slot_at(Stream::pair, source, chunk) - kPairHeader;
}

size_t WorkspaceLayout::use_count_at() const {
  return slot_at(Stream(kStreams), 0, 0) - kPairHeader;
}

size_t WorkspaceLayout::card_at() const {
  return use_count_at() + kUseCount;
}

size_t WorkspaceLayout::bytes() const {
  return card_at() + sizeof(CallCard);
}

int WorkspaceLayout::arrived(Stream stream, int source) const {
  return (2 * int(stream)) * ranks + source;
}

int WorkspaceLayout::freed(Stream stream, int peer) const {
  return (2 * int(stream) + 1) * ranks + peer;
}

int WorkspaceLayout::envelope(int source) const {
  return 2 * kStreams * ranks + source;
}

int WorkspaceLayout::done(int source) const {
  return (2 * kStreams + 1) * ranks + source;
}

int WorkspaceLayout::begun(int source) const {
  return (2 * kStreams + 2) * ranks + source;
}

int WorkspaceLayout::signals() const {
  return (2 * kStreams + 3) * ranks;
}

Workspace::Workspace(Communicator& comm, const WorkspaceLayout& layout_,
                     std::shared_ptr<SymmetricBuffer> buffer_, Reach reach_,
                     std::vector<CallCard*> cards_, Raise raise_)
    : layout(layout_),
      buffer(std::move(buffer_)),
      reach(reach_),
      cards(std::move(cards_)),
      raise(std::move(raise_)),
      progress(comm, "collectives"),
      outgoing(std::make_unique_for_overwrite<std::byte[]>(2 * size_t(layout_.ranks) *
                                                           layout_.envelope_bytes)),
      counters_(size_t(kStreams) * size_t(layout_.ranks)) {}

std::byte* Workspace::staging(int peer, uint64_t chunk) {
  const size_t slots = size_t(layout.slots), stride = layout.slot_bytes;
  if (!staging_) {
    staging_ = std::make_unique_for_overwrite<std::byte[]>(size_t(layout.ranks) * slots * stride);
  }
  return staging_.get() + (size_t(peer) * slots + chunk % slots) * stride;
}

}  // namespace tandem
