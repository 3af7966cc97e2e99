#include "comm/mpi/mpi_transport.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

namespace tandem::mpi {

using processes::kHeaderTag;
using processes::kInlineBytes;
using processes::kMessageBytes;
using processes::kPayloadTag;
using processes::MessageKind;

namespace {

constexpr size_t kSlots = 32;
// Max large messages in flight per peer: enough to keep the link busy while the thread sleeps or
// waits for a core.
constexpr int kLargeAtOnce = 8;

bool is_large(const Header& header) {
  return header.bytes > kInlineBytes;
}

size_t size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size_t(size);
}

bool overlap(const Header& a, const Header& b) {
  return a.communicator == b.communicator && a.buffer == b.buffer &&
         a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
}

}  // namespace

MpiTransport::MpiTransport(MPI_Comm comm, TransportSink& sink, EventFd& event_fd)
    : comm_(comm), sink_(sink), event_fd_(event_fd), peers_(size_of(comm)) {
  slots_.assign(kSlots, std::vector<std::byte>(kMessageBytes));
  slot_requests_.assign(kSlots, MPI_REQUEST_NULL);
  for (size_t slot = 0; slot < kSlots; ++slot) post_header(slot);
}

void MpiTransport::post_header(size_t slot) {
  MPI_Irecv(slots_[slot].data(), int(kMessageBytes), MPI_BYTE, MPI_ANY_SOURCE, kHeaderTag, comm_,
            &slot_requests_[slot]);
}

void MpiTransport::send(int peer, std::unique_ptr<Outgoing> message) {
  peers_[size_t(peer)].waiting.push_back(std::move(message));
}

bool MpiTransport::sending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !peer.waiting.empty() || !peer.started.empty();
  });
}

bool MpiTransport::progress() {
  bool moved = take_headers();
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank];
    moved |= finish_sends(peer);
    moved |= start_sends(int(rank), peer);
    moved |= advance(int(rank), peer);
  }
  quiet_rounds_ = moved ? 0 : std::min(quiet_rounds_ + 1, 1000);
  return moved;
}

// Polls less often the longer nothing moves: each poll takes time from the overlapped computation,
// and on a virtual machine a timer costs more than the poll. The network continues meanwhile,
// through the system's socket buffers, with kLargeAtOnce messages to send: 2 MiB last 2 ms at up to
// 1 GB/s.
void MpiTransport::sleep(bool awaited, std::chrono::microseconds longest) {
  std::chrono::microseconds nap(125 << std::min(quiet_rounds_, 4));
  if (awaited) nap = std::chrono::microseconds(quiet_rounds_ < 20 ? 20 : 200);
  nap = std::min(nap, longest);
  pollfd woken{event_fd_.descriptor(), POLLIN, 0};
  const timespec time{0, long(nap.count()) * 1000};
  if (ppoll(&woken, 1, &time, nullptr) > 0) event_fd_.clear();
}

bool MpiTransport::start_sends(int rank, Peer& peer) {
  bool moved = false;
  while (!peer.waiting.empty()) {
    Outgoing& out = *peer.waiting.front();
    const bool dropped = out.pending && out.pending->cancelled;
    if (!dropped && is_large(out.header) && peer.large_started == kLargeAtOnce) break;
    if (dropped) {
      out.release();
      sink_.on_sent();
    } else {
      start(rank, peer, std::move(peer.waiting.front()));
      moved = true;
    }
    peer.waiting.pop_front();
  }
  return moved;
}

void MpiTransport::start(int rank, Peer& peer, std::unique_ptr<Outgoing> message) {
  Started& started = peer.started.emplace_back();
  seal(message->header);
  started.out = std::move(message);
  const Outgoing& out = *started.out;
  const bool large = is_large(out.header);
  const size_t inlined = large ? 0 : size_t(out.header.bytes);
  started.message.resize(sizeof(Header) + inlined);
  std::memcpy(started.message.data(), &out.header, sizeof(Header));
  if (inlined) std::memcpy(started.message.data() + sizeof(Header), out.bytes(), inlined);
  MPI_Isend(started.message.data(), int(started.message.size()), MPI_BYTE, rank, kHeaderTag, comm_,
            &started.requests[0]);
  if (!large) return;
  MPI_Isend(out.bytes(), int(out.header.bytes), MPI_BYTE, rank, kPayloadTag, comm_,
            &started.requests[1]);
  ++peer.large_started;
}

// Tests requests in order: every test of an unfinished one makes MPI poll the network again.
bool MpiTransport::finish_sends(Peer& peer) {
  bool moved = false;
  while (!peer.started.empty()) {
    Started& started = peer.started.front();
    int done = 0;
    MPI_Testall(2, started.requests, &done, MPI_STATUSES_IGNORE);
    if (!done) break;
    if (is_large(started.out->header)) --peer.large_started;
    if (started.out->pending) {
      started.out->release();
      sink_.on_sent();
    }
    peer.started.pop_front();
    moved = true;
  }
  return moved;
}

// Receives from any source match in the order they were posted, so the oldest is filled next and is
// the only one worth testing.
bool MpiTransport::take_headers() {
  bool moved = false;
  while (true) {
    int done = 0;
    MPI_Status status;
    MPI_Test(&slot_requests_[next_slot_], &done, &status);
    if (!done) return moved;
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    accept(status.MPI_SOURCE, std::span(slots_[next_slot_].data(), size_t(bytes)));
    post_header(next_slot_);
    next_slot_ = (next_slot_ + 1) % kSlots;
    moved = true;
  }
}

void MpiTransport::accept(int source, std::span<const std::byte> message) {
  Peer& peer = peers_[size_t(source)];
  if (peer.damaged) return;
  Incoming entry;
  std::memcpy(&entry.header, message.data(), std::min(message.size(), sizeof(Header)));
  peer.damaged = !is_sealed(entry.header);
  if (peer.damaged) return sink_.on_corrupt_header(source);
  const bool large = is_large(entry.header);
  if (!large) entry.contents.assign(message.begin() + sizeof(Header), message.end());
  peer.incoming.push_back(std::move(entry));
}

// Posts a payload's receive, unless an earlier, unfinished put of the same peer touches the same
// bytes.
bool MpiTransport::post_payload(int source, const Peer& peer, size_t index, Incoming& entry) {
  for (size_t i = 0; i < index; ++i) {
    if (entry.buffer && overlap(peer.incoming[i].header, entry.header)) return false;
  }
  std::byte* to = entry.buffer ? entry.buffer->data + entry.header.offset : entry.contents.data();
  MPI_Irecv(to, int(entry.header.bytes), MPI_BYTE, source, kPayloadTag, comm_, &entry.request);
  entry.posted = true;
  return true;
}

bool MpiTransport::advance(int source, Peer& peer) {
  bool moved = false;
  for (size_t i = 0; i < peer.incoming.size(); ++i) {
    Incoming& entry = peer.incoming[i];
    if (entry.posted) continue;
    if (sink_.is_early(entry.header)) break;
    if (!entry.buffer) entry.buffer = sink_.find_buffer(entry.header);
    const bool large = is_large(entry.header);
    if (large && !entry.buffer) entry.contents.resize(size_t(entry.header.bytes));
    entry.posted = !large;
    if (large && !post_payload(source, peer, i, entry)) break;
  }
  while (!peer.incoming.empty()) {
    Incoming& entry = peer.incoming.front();
    if (!entry.posted) break;
    int done = 0;
    MPI_Test(&entry.request, &done, MPI_STATUS_IGNORE);
    if (!done) break;
    deliver(entry);
    peer.incoming.pop_front();
    moved = true;
  }
  return moved;
}

void MpiTransport::deliver(Incoming& entry) {
  if (!entry.buffer) return;
  if (!is_large(entry.header) && entry.header.bytes > 0) {
    std::memcpy(entry.buffer->data + entry.header.offset, entry.contents.data(),
                size_t(entry.header.bytes));
  }
  sink_.on_put(*entry.buffer, entry.header);
}

void MpiTransport::close() {
  for (auto& request : slot_requests_) {
    MPI_Cancel(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
  }
}

}  // namespace tandem::mpi
