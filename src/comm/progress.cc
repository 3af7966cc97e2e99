#include "comm/progress.h"

#include <fmt/format.h>

#include "comm/call_card.h"

namespace tandem {

void Progress::require_even() const {
  process_.require(op_);
  if (!ended_) return;
  throw reason_ ? *reason_ : Aborted(comm_.rank(), std::string(op_));
}

void Progress::leave() {
  ended_ = true;
  mark_left(comm_);
}

void Progress::end(std::string_view reason) {
  leave();  // first, in case formatting the text throws
  end(Aborted(comm_.rank(), fmt::format("{}: a call before this one failed: {}", op_, reason)));
}

void Progress::end(const Aborted& error) {
  leave();
  if (!reason_) reason_ = error;
}

void Progress::refine(const Timeout& error) const {
  const std::string note = describe_peers_call(comm_, error.peer);
  if (!note.empty()) throw Timeout(error, note);
}

void Progress::give_up(std::string_view reason) noexcept {
  if (ended_) return;
  try {
    end(reason);
    comm_.abort(fmt::format("{}: {}", op_, reason));
  } catch (const std::exception&) {
    // Out of memory for the message: the other ranks' waits end by their deadline.
  }
}

}  // namespace tandem
