#include "comm/call_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <span>

#include "comm/agreement.h"
#include "comm/workspace.h"

namespace tandem {
namespace {

using Text = std::array<uint64_t, CallCard::kWords>;

void write_text(CallCard& card, std::string_view name) {
  Text words{};
  std::memcpy(words.data(), name.data(), std::min(name.size(), sizeof words - 1));
  for (size_t i = 0; i < words.size(); ++i) {
    std::atomic_ref(card.text[i]).store(words[i], std::memory_order_relaxed);
  }
}

std::string read_text(CallCard& card) {
  Text words{};
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = std::atomic_ref(card.text[i]).load(std::memory_order_relaxed);
  }
  const char* text = reinterpret_cast<const char*>(words.data());
  return {text, strnlen(text, sizeof words)};
}

std::string_view name_of(const CallCard::Used& used) {
  return {used.name.data(), strnlen(used.name.data(), used.name.size())};
}

void compare(const Communicator& comm, std::string_view op, int rank,
             const CallCard::Operands& local, int peer, const CallCard::Operands& remote) {
  for (const auto& a : std::span(local.used).first(local.count)) {
    for (const auto& b : std::span(remote.used).first(remote.count)) {
      if ((!a.written && !b.written) || !a.rows.overlaps(b.rows)) continue;
      require_all_stay(comm, op);  // a rank that has left may have freed this memory
      throw AgreedArgument(fmt::format(
          "{}: {} of rank {} at {:#x} overlaps {} of rank {} at {:#x}: expected memory of its own "
          "for each rank",
          op, name_of(a), rank, a.rows.begin, name_of(b), peer, b.rows.begin));
    }
  }
}

}  // namespace

CallOnCard::CallOnCard(Communicator& comm, std::string_view name)
    : comm_(comm), errors_(std::uncaught_exceptions()) {
  space_ = comm.workspace_if_any();
  if (!space_ || comm.size() == 1) {
    space_ = nullptr;
    return;
  }
  card_ = space_->cards[size_t(comm.rank())];
  if (space_->call_depth++ == 0 && card_) write_text(*card_, name);
}

CallOnCard::~CallOnCard() {
  if (!space_) return;
  const bool outermost = --space_->call_depth == 0;
  if (outermost && card_ && std::uncaught_exceptions() <= errors_) write_text(*card_, "");
}

void CallOnCard::use(std::string_view name, const Tensor& tensor, bool written) {
  if (!space_ || space_->reach == Reach::no_addresses) return;
  if (!local_operands_) {
    const uint64_t call = ++space_->operator_calls;
    local_operands_ = &card_->operands[call % 2];
    local_operands_->call = call;
    local_operands_->count = 0;
  }
  CallCard::Used& used = local_operands_->used.at(local_operands_->count++);
  used = {{}, written, byte_rows(tensor)};
  name.copy(used.name.data(), used.name.size());
}

void CallOnCard::require_apart(std::string_view op) {
  if (!local_operands_) return;
  const uint64_t call = local_operands_->call;
  const int size = comm_.size(), me = comm_.rank();
  for (int step = 1; step < size; ++step) {
    space_->raise((me + step) % size, space_->layout.begun(me), call);
  }
  for (int step = 1; step < size; ++step) {
    const int peer = (me + step) % size;
    comm_.wait(*space_->buffer, space_->layout.begun(peer), call, {op, peer});
  }
  std::vector<const CallCard::Operands*> all;
  for (const CallCard* card : space_->cards) all.push_back(&card->operands[call % 2]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      if (all[rank]->call != call || all[other]->call != call) continue;
      compare(comm_, op, int(other), *all[other], int(rank), *all[rank]);
    }
  }
}

void mark_left(const Communicator& comm) {
  const Workspace* space = comm.workspace_if_any();
  CallCard* const card = space ? space->cards[size_t(comm.rank())] : nullptr;
  if (card) std::atomic_ref(card->has_left).store(1, std::memory_order_release);
}

void require_all_stay(const Communicator& comm, std::string_view op) {
  const Workspace* space = comm.workspace_if_any();
  for (int peer = 0; space && peer < comm.size(); ++peer) {
    CallCard* const card = space->cards[size_t(peer)];
    if (peer == comm.rank() || !card) continue;
    if (std::atomic_ref(card->has_left).load(std::memory_order_acquire) == 0) continue;
    throw Aborted(peer, fmt::format("{}: it has left the call", op));
  }
}

std::string describe_peers_call(const Communicator& comm, int peer) {
  const Workspace* space = comm.workspace_if_any();
  if (!space || peer < 0 || peer >= comm.size() || peer == comm.rank()) return "";
  CallCard* const local = space->cards[size_t(comm.rank())];
  CallCard* const remote = space->cards[size_t(peer)];
  if (!local || !remote) return "";
  const std::string local_text = read_text(*local), remote_text = read_text(*remote);
  if (local_text == remote_text || local_text.empty()) return "";
  return fmt::format("rank {} is in {}, rank {} in {}: expected the same call on all ranks", peer,
                     remote_text.empty() ? "no call" : remote_text, comm.rank(), local_text);
}

}  // namespace tandem
