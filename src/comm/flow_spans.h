// Spans of messages and collectives that arrows of a trace connect (observe/trace.h). Peers are
// named by their rank in the world. All of it is empty unless events are traced, and for GPU ranks.
#pragma once

#include <cstdint>

#include "observe/recorder.h"
#include "tandem/communicator.h"

namespace tandem {

/// Number of a new stream of messages, for all ranks that call it in the same order: collective,
/// but waits for no rank.
uint32_t make_flow_stream(Communicator& comm);

/// Peer of a wait for message `number` of the stream from rank `source` of `comm`.
SpanPeer receive_from(const Communicator& comm, int source, uint32_t stream, int64_t number);
/// Peer of the span of `send` or `recv`, of message `number` between this rank and `peer`.
SpanPeer pair_message(const Communicator& comm, FlowRole role, int peer, int64_t number);
/// Peer of the span of a collective call, which all ranks of `comm` make in the same order.
SpanPeer collective_call(Communicator& comm);

/// Span of the puts of a message during its lifetime: on an emulated link, their time on the link.
class ScopedSend {
 public:
  /// `name`: a literal. `destination`: rank of `comm`.
  ScopedSend(const Communicator& comm, const char* name, int tile, int destination, uint32_t stream,
             int64_t number);
  ~ScopedSend();
  ScopedSend(const ScopedSend&) = delete;
  ScopedSend& operator=(const ScopedSend&) = delete;

  /// Records the time of a put on a link: as part of the calling thread's message, if there is one.
  static void add_transfer(TimePoint begin, TimePoint end, int peer);

 private:
  SpanEvent event_;
  ScopedSend* outer_ = nullptr;
  bool is_traced_ = false, was_on_link_ = false;
};

}  // namespace tandem
