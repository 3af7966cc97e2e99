#include "messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "tandem/error.h"

namespace tandem::python {
namespace {

constexpr uint64_t kSlots = 4;
constexpr size_t kSlotBytes = 128 << 10, kHeaderBytes = 64;

TandemError error_of(int kind, const std::string& text) {
  TandemError error{.kind = kind, .text = {}};
  text.copy(error.text, sizeof error.text - 1);
  return error;
}

const char* verb_of(const TandemMessage& message) {
  return message.sends ? "send" : "recv";
}

}  // namespace

Messages::Messages(std::shared_ptr<Communicator> comm)
    : comm_(std::move(comm)),
      buffer_(comm_->allocate(size_t(comm_->size()) * kSlots * (kHeaderBytes + kSlotBytes),
                              3 * comm_->size())),
      peers_(size_t(comm_->size())),
      thread_([this] { run(); }) {}

Messages::~Messages() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  posted_.notify_one();
  thread_.join();
  try {
    for (int rank = 0; rank < comm_->size(); ++rank) {
      if (rank != comm_->rank()) comm_->put(rank, *buffer_, 0, nullptr, 0, left(comm_->rank()), 1);
    }
    comm_->flush();
  } catch (const std::exception&) {  // the others know
  }
}

void Messages::post(const TandemMessage& message) {
  const bool is_rank =
      message.peer >= 0 && message.peer < comm_->size() && message.peer != comm_->rank();
  if (!is_rank && (message.sends || message.peer != kTandemAnyPeer)) {
    throw InvalidArgument(fmt::format("{}: peer {} on rank {}: expected another rank, 0 to {}",
                                      verb_of(message), message.peer, comm_->rank(),
                                      comm_->size() - 1));
  }
  {
    const std::lock_guard lock(mutex_);
    const auto allowed = std::chrono::duration<double>(message.deadline_s);
    new_.push_back({message, Clock::now() + std::chrono::duration_cast<Clock::duration>(allowed)});
  }
  posted_.notify_one();
}

std::deque<Messages::Posted>& Messages::receives_or_sends(const TandemMessage& message) {
  if (message.peer == kTandemAnyPeer) return from_any_;
  Peer& peer = peers_[size_t(message.peer)];
  return message.sends ? peer.sends : peer.receives;
}

size_t Messages::slot_at(int rank, uint64_t chunk) const {
  return (size_t(rank) * kSlots + chunk % kSlots) * (kHeaderBytes + kSlotBytes);
}

bool Messages::is_idle() const {
  return from_any_.empty() && std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
           return peer.sends.empty() && peer.receives.empty() && !peer.incoming;
         });
}

// Polls, first without a pause and then with longer ones, while messages are in flight.
void Messages::run() {
  std::optional<TandemError> failed;
  int idle_rounds = 0;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (is_idle()) posted_.wait(lock, [&] { return ends_ || !new_.empty(); });
      for (Posted& each : new_) {
        receives_or_sends(each.message).push_back(each);
        idle_rounds = 0;
      }
      new_.clear();
      if (ends_ && !failed) failed = error_of(kTandemAborted, "the process group was destroyed");
      if (ends_ && is_idle()) return;
    }
    if (!failed) {
      try {
        if (advance()) {
          idle_rounds = 0;
          continue;
        }
        check_waits();
      } catch (const std::exception& error) {
        describe_error(failed.emplace());
        comm_->abort(error.what());
      }
    }
    if (failed) {
      fail_all(*failed);
      continue;
    }
    if (++idle_rounds < 200) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(idle_rounds, 500)));
    }
  }
}

bool Messages::advance() {
  bool moved = false;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    Peer& peer = peers_[size_t(rank)];
    moved |= send_chunk(rank, peer);
    moved |= take_stashed(rank, peer);
    moved |= receive_chunk(rank, peer);
  }
  return moved;
}

bool Messages::send_chunk(int rank, Peer& peer) {
  if (peer.sends.empty()) return false;
  if (peer.sent >= kSlots && comm_->read_signal(*buffer_, freed(rank)) < peer.sent + 1 - kSlots) {
    return false;
  }
  Posted& send = peer.sends.front();
  const size_t slot = slot_at(comm_->rank(), peer.sent);
  const int signal = arrived(comm_->rank());
  const Header header{send.message.tag, send.message.bytes};
  if (send.at == 0) {  // raises no signal: the following chunk does
    comm_->put(rank, *buffer_, slot, &header, sizeof header, signal, peer.sent);
  }
  const size_t bytes = size_t(std::min<uint64_t>(kSlotBytes, send.message.bytes - send.at));
  comm_->put(rank, *buffer_, slot + kHeaderBytes,
             static_cast<const std::byte*>(send.message.data) + send.at, bytes, signal,
             ++peer.sent);
  comm_->flush();
  send.at += bytes;
  if (send.at < send.message.bytes) return true;
  send.message.done(send.message.context, nullptr, comm_->rank());
  peer.sends.pop_front();
  return true;
}

bool Messages::take_stashed(int rank, Peer& peer) {
  for (auto stashed = peer.stash.begin(); stashed != peer.stash.end(); ++stashed) {
    const auto wanted = take_receive(peer, stashed->header.tag);
    if (!wanted) continue;
    const Incoming incoming{stashed->header, wanted, {}};
    if (incoming.fits() && !stashed->data.empty()) {
      std::memcpy(wanted->message.data, stashed->data.data(), stashed->data.size());
    }
    peer.stash.erase(stashed);
    finish(rank, incoming);
    return true;
  }
  return false;
}

std::optional<Messages::Posted> Messages::take_receive(Peer& peer, int64_t tag) {
  for (auto* posted : {&peer.receives, &from_any_}) {
    const auto found = std::find_if(posted->begin(), posted->end(),
                                    [&](const Posted& each) { return each.message.tag == tag; });
    if (found == posted->end()) continue;
    const Posted taken = *found;
    posted->erase(found);
    return taken;
  }
  return std::nullopt;
}

Messages::Incoming Messages::begin(Peer& peer, const Header& header) {
  Incoming incoming{header, take_receive(peer, header.tag), {}};
  if (!incoming.to || !incoming.fits()) incoming.data.resize(header.bytes);
  return incoming;
}

// Messages stay in their slots until this rank expects one from their sender.
bool Messages::receive_chunk(int rank, Peer& peer) {
  if (peer.receives.empty() && from_any_.empty() && !peer.incoming) return false;
  if (comm_->read_signal(*buffer_, arrived(rank)) <= peer.received) return false;
  const std::byte* slot = buffer_->local() + slot_at(rank, peer.received);
  if (!peer.incoming) {
    Header header;
    std::memcpy(&header, slot, sizeof header);
    peer.incoming.emplace(begin(peer, header));
  }
  Incoming& incoming = *peer.incoming;
  const size_t bytes = size_t(std::min<uint64_t>(kSlotBytes, incoming.header.bytes - incoming.at));
  std::byte* const to = incoming.data.empty() && incoming.to
                            ? static_cast<std::byte*>(incoming.to->message.data)
                            : incoming.data.data();
  if (bytes) std::memcpy(to + incoming.at, slot + kHeaderBytes, bytes);
  incoming.at += bytes;
  comm_->put(rank, *buffer_, 0, nullptr, 0, freed(comm_->rank()), ++peer.received);
  if (incoming.at < incoming.header.bytes) return true;
  if (incoming.to) {
    finish(rank, incoming);
  } else {
    peer.stash.push_back({incoming.header, std::move(incoming.data)});
  }
  peer.incoming.reset();
  return true;
}

void Messages::finish(int rank, const Incoming& incoming) const {
  const TandemMessage& message = incoming.to->message;
  if (incoming.fits()) return message.done(message.context, nullptr, rank);
  const TandemError error = error_of(
      kTandemInvalid,
      fmt::format("recv: rank {} sends {} bytes with tag {}, rank {} expects {}", rank,
                  incoming.header.bytes, incoming.header.tag, comm_->rank(), message.bytes));
  message.done(message.context, &error, rank);
}

void Messages::check_waits() {
  const auto now = Clock::now();
  const auto check = [&](const Posted& posted, const Peer& peer) {
    if (posted.until > now) return;
    const TandemMessage& message = posted.message;
    const uint64_t seen = message.sends ? peer.sent : peer.received;
    throw Timeout({verb_of(message), message.peer}, comm_->rank(), seen + 1, seen,
                  message.deadline_s);
  };
  if (!from_any_.empty()) check(from_any_.front(), Peer{});
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const Peer& peer = peers_[size_t(rank)];
    if (!peer.sends.empty()) check(peer.sends.front(), peer);
    if (!peer.receives.empty()) check(peer.receives.front(), peer);
    if (peer.incoming && peer.incoming->to) check(*peer.incoming->to, peer);
    const bool waits = !peer.sends.empty() || !peer.receives.empty();
    if (!waits || comm_->read_signal(*buffer_, left(rank)) == 0) continue;
    if (comm_->read_signal(*buffer_, arrived(rank)) > peer.received) continue;  // its last messages
    throw Aborted(rank, fmt::format("{}: it has left the process group",
                                    peer.receives.empty() ? "send" : "recv"));
  }
  comm_->wait(*buffer_, 0, 0, {"messages"});  // throws if a rank has failed
}

void Messages::fail_all(const TandemError& error) {
  const auto fail = [&](std::deque<Posted>& posted) {
    for (const Posted& each : posted) each.message.done(each.message.context, &error, -1);
    posted.clear();
  };
  for (Peer& peer : peers_) {
    if (peer.incoming && peer.incoming->to) peer.receives.push_front(*peer.incoming->to);
    peer.incoming.reset();
    fail(peer.sends);
    fail(peer.receives);
  }
  fail(from_any_);
}

void describe_error(TandemError& error) {
  try {
    throw;
  } catch (const Timeout& e) {
    error = error_of(kTandemTimeout, e.what());
  } catch (const Aborted& e) {
    error = error_of(kTandemAborted, e.what());
  } catch (const InvalidArgument& e) {
    error = error_of(kTandemInvalid, e.what());
  } catch (const std::exception& e) {
    error = error_of(kTandemInternal, e.what());
  }
}

}  // namespace tandem::python
