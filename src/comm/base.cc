#include "comm/base.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/arguments.h"

namespace tandem {
namespace {

struct SlotHeader {
  uint64_t total;  ///< bytes of the whole blob
  char what[56];
};
constexpr size_t kChunk = 1024;
constexpr size_t kSlot = sizeof(SlotHeader) + kChunk;

/// Scope in which memory is allocated for the call `name`.
struct NameOfCall {
  std::string_view& call;
  const std::string_view before;
  NameOfCall(std::string_view& call_, std::string_view name)
      : call(call_), before(std::exchange(call_, name)) {}
  ~NameOfCall() { call = before; }
};

SlotHeader header_at(const std::byte* slot) {
  SlotHeader header;
  std::memcpy(&header, slot, sizeof header);
  return header;
}

/// FNV-1a.
uint32_t hash_name(std::string_view name) {
  uint32_t hash = 2166136261u;
  for (const char c : name) hash = (hash ^ uint8_t(c)) * 16777619u;
  return hash;
}

std::string_view what_of(const SlotHeader& header) {
  return {header.what, strnlen(header.what, sizeof header.what)};
}

}  // namespace

void BaseCommunicator::make_workspace() {
  if (workspace_) return;
  const WorkspaceLayout layout = WorkspaceLayout::of(size_);
  auto buffer = do_allocate_workspace(layout.bytes(), layout.signals());
  std::vector<CallCard*> cards;
  for (int rank = 0; rank < size_; ++rank) {
    std::byte* memory = look_at(*buffer, rank);
    cards.push_back(memory ? reinterpret_cast<CallCard*>(memory + layout.card_at()) : nullptr);
  }
  const auto raise = [this, memory = buffer.get()](int peer, int signal, uint64_t epoch) {
    do_raise(peer, *memory, signal, epoch);
  };
  workspace_ = std::make_shared<Workspace>(*this, layout, std::move(buffer), reach_,
                                           std::move(cards), raise);
}

void BaseCommunicator::stop() {
  workspace_.reset();
  control_.reset();
}

std::shared_ptr<SymmetricBuffer> BaseCommunicator::allocate(size_t bytes, int signals) {
  check_allocation(bytes, signals);
  require_same("allocate", fmt::format("{} bytes, {} signals", bytes, signals));
  return progress_.during([&] { return do_allocate(bytes, signals); });
}

void BaseCommunicator::put(int peer, SymmetricBuffer& buffer, size_t offset, const void* source,
                           size_t bytes, int signal, uint64_t epoch) {
  process_.require("put");
  check_put(size_, peer, buffer, offset, bytes, signal);
  do_put(peer, buffer, offset, source, bytes, signal, epoch);
}

uint64_t BaseCommunicator::read_signal(const SymmetricBuffer& buffer, int signal) const {
  check_signal(buffer, signal, "read_signal");
  return do_read_signal(buffer, signal);
}

void BaseCommunicator::wait(const SymmetricBuffer& buffer, int signal, uint64_t epoch,
                            const WaitSite& site) {
  process_.require("wait");
  check_signal(buffer, signal, "wait");
  do_wait(buffer, signal, epoch, site);
}

std::unique_ptr<Communicator> BaseCommunicator::split(int color, int key) {
  const int local_data[2] = {color, key};
  const auto blobs = exchange(std::as_bytes(std::span(local_data)), "split");
  std::vector<std::pair<int, int>> order;  // (key, rank) of the ranks with this rank's color
  for (int r = 0; r < size_; ++r) {
    int remote[2];
    std::memcpy(remote, blobs[size_t(r)].data(), sizeof remote);
    if (remote[0] == color) order.emplace_back(remote[1], r);
  }
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  for (const auto& [unused, r] : order) members.push_back(r);
  const auto me = std::find(members.begin(), members.end(), rank_);
  return make_member(fmt::format("split {} {}", splits_++, color), members,
                     int(me - members.begin()));
}

std::unique_ptr<Communicator> BaseCommunicator::group(std::string_view name,
                                                      const std::vector<int>& members) {
  const auto me = std::find(members.begin(), members.end(), rank_);
  const auto [min, max] = std::minmax_element(members.begin(), members.end());
  if (me == members.end() || *min < 0 || *max >= size_) {
    throw InvalidArgument(
        fmt::format("group {} of rank {}: members {}: expected ranks 0 to {}, its own among them",
                    name, rank_, fmt::join(members, ", "), size_ - 1));
  }
  const int made = groups_made_[fmt::format("{} {}", name, fmt::join(members, " "))]++;
  return make_member(fmt::format("{} {}", name, made), members, int(me - members.begin()));
}

std::unique_ptr<Communicator> BaseCommunicator::make_member(const std::string& name,
                                                            const std::vector<int>& members,
                                                            int index) {
  auto made = do_group(name, members, index);
  if (auto* const base = dynamic_cast<BaseCommunicator*>(made.get())) {
    for (const int member : members) base->world_ranks_.push_back(world_rank(member));
    base->trace_id_ =
        hash_name(fmt::format("{} {} {}", trace_id_, name, fmt::join(base->world_ranks_, " ")));
  }
  return made;
}

uint32_t BaseCommunicator::next_stream() {
  return hash_name(fmt::format("{} stream {}", trace_id_, streams_++));
}

const std::byte* BaseCommunicator::control_slot(int source) const {
  return control_->local() + ((round_ & 1) * size_t(size_) + size_t(source)) * kSlot;
}

void BaseCommunicator::exchange_round(std::span<const std::byte> chunk, size_t total,
                                      std::string_view what) {
  ++round_;
  std::byte* slot = outgoing_.data() + (round_ & 1) * kSlot;
  SlotHeader header{total, {}};
  std::memcpy(header.what, what.data(), std::min(what.size(), sizeof header.what));
  std::memcpy(slot, &header, sizeof header);
  if (!chunk.empty()) std::memcpy(slot + sizeof header, chunk.data(), chunk.size());
  const size_t offset = ((round_ & 1) * size_t(size_) + size_t(rank_)) * kSlot;
  for (int step = 0; step < size_; ++step) {
    const int peer = (rank_ + step) % size_;
    do_put(peer, *control_, offset, slot, sizeof header + chunk.size(), rank_, round_);
  }
  for (int r = 0; r < size_; ++r) do_wait(*control_, r, round_, WaitSite{what, r});
}

std::vector<std::vector<std::byte>> BaseCommunicator::exchange(std::span<const std::byte> blob,
                                                               std::string_view what) {
  std::vector<std::vector<std::byte>> all(static_cast<size_t>(size_));
  const CallOnCard on_card(*this, what);
  progress_.during([&] {
    if (do_exchange(blob, what, all)) return;
    if (!control_) {
      const NameOfCall named(call_, what);
      control_ = do_allocate(2 * size_t(size_) * kSlot, size_);
      outgoing_.resize(2 * kSlot);
    }
    exchange_all(blob, what, all);
  });
  return all;
}

void BaseCommunicator::exchange_all(std::span<const std::byte> blob, std::string_view what,
                                    std::vector<std::vector<std::byte>>& all) {
  size_t longest = 1;
  for (size_t at = 0; at < longest; at += kChunk) {
    const size_t begin = std::min(at, blob.size());
    exchange_round(blob.subspan(begin, std::min(kChunk, blob.size() - begin)), blob.size(), what);
    for (int r = 0; r < size_; ++r) {
      const std::byte* slot = control_slot(r);
      const SlotHeader header = header_at(slot);
      const SlotHeader first = header_at(control_slot(0));
      if (what_of(header) != what_of(first)) {
        throw Mismatch(fmt::format("rank 0 is in {}, rank {} in {}: expected the same call",
                                   what_of(first), r, what_of(header)));
      }
      auto& text = all[size_t(r)];
      const std::byte* payload = slot + sizeof header;
      text.insert(text.end(), payload,
                  payload + std::min<size_t>(kChunk, header.total - text.size()));
      longest = std::max<size_t>(longest, header.total);
    }
  }
}

}  // namespace tandem
