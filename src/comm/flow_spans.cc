#include "comm/flow_spans.h"

#include <utility>

#include "comm/base.h"

namespace tandem {
namespace {

thread_local ScopedSend* current_send = nullptr;

const BaseCommunicator* traced(const Communicator& comm) {
  return recorder().tracing() ? dynamic_cast<const BaseCommunicator*>(&comm) : nullptr;
}

}  // namespace

uint32_t make_flow_stream(Communicator& comm) {
  auto* const base = dynamic_cast<BaseCommunicator*>(&comm);
  return base ? base->next_stream() : 0;
}

SpanPeer receive_from(const Communicator& comm, int source, uint32_t stream, int64_t number) {
  const BaseCommunicator* const base = traced(comm);
  if (!base) return {};
  return {base->world_rank(source), {FlowRole::receive, 0, stream, number}};
}

SpanPeer pair_message(const Communicator& comm, FlowRole role, int peer, int64_t number) {
  const BaseCommunicator* const base = traced(comm);
  if (!base) return {};
  return {base->world_rank(peer), {role, 0, base->trace_id(), number}};
}

SpanPeer collective_call(Communicator& comm) {
  auto* const base = dynamic_cast<BaseCommunicator*>(&comm);
  if (!base || comm.size() == 1) return {};
  return {-1, {FlowRole::collective, comm.size(), base->trace_id(), base->next_call()}};
}

ScopedSend::ScopedSend(const Communicator& comm, const char* name, int tile, int destination,
                       uint32_t stream, int64_t number) {
  const BaseCommunicator* const base = traced(comm);
  if (!base) return;
  is_traced_ = true;
  event_ = {SpanKind::transfer,
            name,
            std::chrono::steady_clock::now(),
            {},
            tile,
            base->world_rank(destination),
            -1,
            {FlowRole::send, 0, stream, number}};
  outer_ = std::exchange(current_send, this);
}

ScopedSend::~ScopedSend() {
  if (!is_traced_) return;
  current_send = outer_;
  event_.end = std::chrono::steady_clock::now();
  if (!was_on_link_) recorder().add(event_);
}

void ScopedSend::add_transfer(TimePoint begin, TimePoint end, int peer) {
  if (!current_send) return recorder().add({SpanKind::transfer, "put", begin, end, -1, peer});
  current_send->was_on_link_ = true;
  SpanEvent event = current_send->event_;
  event.begin = begin, event.end = end;
  recorder().add(event);
}

}  // namespace tandem
