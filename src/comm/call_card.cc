#include "comm/call_card.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <span>

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

void compare(std::string_view op, int rank, const CallCard::Operands& mine, int peer,
             const CallCard::Operands& theirs) {
  for (const auto& a : std::span(mine.used).first(mine.count)) {
    for (const auto& b : std::span(theirs.used).first(theirs.count)) {
      if ((!a.written && !b.written) || !a.rows.overlaps(b.rows)) continue;
      throw InvalidArgument(fmt::format(
          "{}: {} of rank {} at {:#x} overlaps {} of rank {} at {:#x}: expected memory of its own "
          "for each rank, results are undefined",
          op, name_of(a), rank, a.rows.begin, name_of(b), peer, b.rows.begin));
    }
  }
}

}  // namespace

CallOnCard::CallOnCard(Communicator& comm, std::string_view name)
    : errors_(std::uncaught_exceptions()) {
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
  if (!own_) {
    const uint64_t call = ++space_->operator_calls;
    own_ = &card_->operands[call % 2];
    own_->call = call;
    own_->count = 0;
  }
  CallCard::Used& used = own_->used.at(own_->count++);
  used = {{}, written, byte_rows(tensor)};
  name.copy(used.name.data(), used.name.size());
}

void CallOnCard::require_apart(std::string_view op) const {
  if (!own_) return;
  const uint64_t call = own_->call;
  std::vector<const CallCard::Operands*> all;
  for (const CallCard* card : space_->cards) all.push_back(&card->operands[call % 2]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t other = 0; other < rank; ++other) {
      if (all[rank]->call != call || all[other]->call != call) continue;
      compare(op, int(other), *all[other], int(rank), *all[rank]);
    }
  }
}

std::string describe_peers_call(const Communicator& comm, int peer) {
  const Workspace* space = comm.workspace_if_any();
  if (!space || peer < 0 || peer >= comm.size() || peer == comm.rank()) return "";
  CallCard* const mine = space->cards[size_t(comm.rank())];
  CallCard* const theirs = space->cards[size_t(peer)];
  if (!mine || !theirs) return "";
  const std::string own = read_text(*mine), other = read_text(*theirs);
  if (own == other || own.empty()) return "";
  return fmt::format("rank {} is in {}, rank {} in {}: expected the same call on all ranks", peer,
                     other.empty() ? "no call" : other, comm.rank(), own);
}

}  // namespace tandem
