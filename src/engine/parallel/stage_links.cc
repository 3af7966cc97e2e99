#include "engine/parallel/stage_links.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "codec/enqueue.h"
#include "comm/exec.h"
#include "comm/flow_spans.h"
#include "core/system/process/clock.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Slots are aligned for GPUs' kernels.
constexpr size_t slot_room(size_t message_bytes) {
  constexpr size_t kSlotAlignment = 256;
  return (message_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

size_t encoded_bytes(const Tensor& message, const Wire& wire) {
  return wire.is_none() ? message.bytes() : wire.bytes(message.elements(), message.dtype());
}

}  // namespace

StageLinks::StageLinks(Communicator& pp, const Exec& exec, std::vector<Channel> channels,
                       const Tensor& message, const Wire& wire)
    : pp_(pp),
      exec_(exec),
      channels_(std::move(channels)),
      rows_(message.dim(0)),
      columns_(message.dim(1)),
      wire_(wire),
      message_bytes_(encoded_bytes(message, wire)),
      slot_bytes_(slot_room(message_bytes_)),
      stream_(make_flow_stream(pp)),
      is_enqueued_(exec.on_gpu()) {
  set_exec(pp, exec);
  std::vector<int> slots(size_t(pp.size())), signals(slots);
  for (const Channel& channel : channels_) {
    const auto source = size_t(channel.source), destination = size_t(channel.destination);
    const auto count = size_t(channel.slots);
    Slots& s = slots_.emplace_back();
    s.offset = size_t(slots[destination]) * slot_bytes_;
    s.arrival = signals[destination];
    slots[destination] += channel.slots;
    signals[destination] += channel.slots;
    s.acknowledgement = signals[source];
    signals[source] += channel.slots;
    if (channel.source == pp.rank() && (channel.is_copied || !wire.is_none())) {
      s.sent = Memory(count * slot_bytes_, exec.device);
    }
    if (channel.destination == pp.rank() && !wire.is_none()) {
      s.decoded = Memory(count * message.bytes(), exec.device);
    }
  }
  buffer_ = pp.allocate(size_t(std::ranges::max(slots)) * slot_bytes_, std::ranges::max(signals));
  if (!is_enqueued_) return;
  for (const Channel& channel : channels_) {
    if (channel.source != pp.rank() || buffer_->peer(channel.destination)) continue;
    throw Unsupported(fmt::format(
        "parallel.pp = {}: stages {} and {}: expected GPUs that reach each other's memory",
        pp.size(), channel.source, channel.destination));
  }
}

StageLinks::~StageLinks() {
  try {
    pp_.flush();
  } catch (const Error&) {
    // The world has failed; the transport releases its sources before it reports that.
  }
}

void StageLinks::end_run() {
  host_waits_ = false;
  if (is_enqueued_) pp_.flush();
}

Tensor StageLinks::as_message(void* values) const {
  return Tensor(values, DType::f32, {rows_, columns_}, exec_.device);
}

void StageLinks::wait(int signal, uint64_t epoch, const WaitSite& site, const char* op,
                      const SpanPeer& peer) {
  if (is_enqueued_ && !host_waits_) return pp_.enqueue_wait(*buffer_, signal, epoch, site);
  const auto begin = std::chrono::steady_clock::now();
  const ScopedWait span(Phase::pp_wait, op, -1, peer);
  pp_.wait(*buffer_, signal, epoch, site);
  waited_s_ += seconds_since(begin);
}

void StageLinks::send(int index, uint64_t number, const Tensor& message) {
  const Channel& channel = channels_[size_t(index)];
  Slots& s = slots_[size_t(index)];
  const auto count = uint64_t(channel.slots);
  const auto slot = size_t(number % count);
  if (number >= count) {
    const int to = channel.destination;
    wait(s.acknowledgement + int(slot), number + 1 - count, {channel.op, to, int64_t(number)},
         channel.op, receive_from(pp_, to, stream_, 0).rank);
  }
  const void* sent = message.data();
  size_t bytes = message_bytes_;
  if (s.sent.bytes() > 0) {
    std::byte* const to = s.sent.data() + slot * slot_bytes_;
    if (wire_.is_none()) {
      copy(exec_, message, as_message(to));
    } else {
      bytes = enqueue_encode(exec_, wire_, message, to);
    }
    sent = to;
  }
  sent_bytes_ += bytes;
  const ScopedSend span(pp_, channel.op, -1, channel.destination, stream_,
                        message_of(channel, number));
  pp_.put(channel.destination, *buffer_, s.offset + slot * slot_bytes_, sent, bytes,
          s.arrival + int(slot), number + 1);
}

Tensor StageLinks::receive(int index, uint64_t number) {
  const Channel& channel = channels_[size_t(index)];
  const Slots& s = slots_[size_t(index)];
  const auto slot = size_t(number % uint64_t(channel.slots));
  wait(s.arrival + int(slot), number + 1, {channel.op, channel.source, int64_t(number)}, channel.op,
       receive_from(pp_, channel.source, stream_, message_of(channel, number)));
  std::byte* const received = buffer_->local() + s.offset + slot * slot_bytes_;
  if (wire_.is_none()) return as_message(received);
  const Tensor decoded =
      as_message(s.decoded.data() + slot * size_t(rows_ * columns_) * sizeof(float));
  enqueue_decode(exec_, wire_, {received, message_bytes_}, decoded);
  return decoded;
}

void StageLinks::acknowledge(int index, uint64_t number) {
  const Channel& channel = channels_[size_t(index)];
  const int slot = int(number % uint64_t(channel.slots));
  pp_.put(channel.source, *buffer_, 0, nullptr, 0, slots_[size_t(index)].acknowledgement + slot,
          number + 1);
}

}  // namespace tandem
