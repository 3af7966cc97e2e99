#include "engine/parallel/message_ring.h"

#include <algorithm>

#include "comm/exec.h"
#include "comm/flow_spans.h"
#include "observe/recorder.h"
#include "schedule/ring.h"

namespace tandem {

int MessageRing::max_window(int64_t buckets, int64_t bucket_elements, bool is_staged, bool on_gpu) {
  constexpr int64_t kMinWindow = 4, kElements = int64_t(2) << 20, kShare = 48;
  if (on_gpu) return kMinWindow;
  const int64_t few = std::clamp(kElements / bucket_elements, kMinWindow, 2 * kMinWindow);
  return int(is_staged ? few : std::max(few, buckets / kShare));
}

MessageRing::MessageRing(Communicator& dp, const char* op, const Buckets& buckets,
                         size_t message_bytes, int staged_messages, bool host_waits)
    : dp_(dp),
      op_(op),
      stream_(make_flow_stream(dp)),
      is_enqueued_(dp.on_gpu()),
      buckets_(buckets.count()),
      window_(std::clamp(
          buckets_, 1,
          max_window(buckets_, buckets.bucket_elements(), staged_messages > 0, is_enqueued_))),
      host_waits_(host_waits),
      message_bytes_(message_bytes) {
  if (dp.size() == 1) return;
  slots_ = dp.allocate(size_t(dp.size() * window_) * message_bytes, dp.size() * (window_ + 1));
  staging_ = Memory(size_t(staged_messages * window_) * message_bytes, make_exec(dp).device);
  if (is_enqueued_) make_streams();
}

/// Sends zeros and raises no signal: the first put makes a stream, which a kernel that waits for
/// this rank would keep it from on a GPU that they share.
void MessageRing::make_streams() {
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int rank = destination(hop);
    const size_t at = message_offset(dp_.rank(), 0);
    dp_.put(rank, *slots_, at, slots_->local() + at, message_bytes_, acknowledgement(dp_.rank()),
            0);
  }
  dp_.flush();
  dp_.barrier(op_);
}

void MessageRing::wait(int signal, uint64_t epoch, const WaitSite& site) {
  if (host_waits_) return dp_.wait(*slots_, signal, epoch, site);
  dp_.enqueue_wait(*slots_, signal, epoch, site);
}

int MessageRing::destination(int hop) const {
  return schedule::ag_source(dp_.rank(), dp_.size(), hop);
}

int MessageRing::source(int hop) const {
  return schedule::ag_target(dp_.rank(), dp_.size(), hop);
}

bool MessageRing::can_send(int bucket) {
  if (is_enqueued_) {
    wait_for_room(bucket);
    return true;
  }
  if (epoch(bucket) <= uint64_t(window_)) return true;
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const uint64_t read = dp_.read_signal(*slots_, acknowledgement(source(hop)));
    if (read < epoch(bucket) - uint64_t(window_)) return false;
  }
  return true;
}

void MessageRing::wait_for_room(int bucket) {
  if (epoch(bucket) <= uint64_t(window_)) return;
  for (int hop = 1; hop < dp_.size(); ++hop) {
    const int rank = source(hop);
    const ScopedWait span(Phase::dp_wait, op_, bucket, receive_from(dp_, rank, stream_, 0).rank);
    wait(acknowledgement(rank), epoch(bucket) - uint64_t(window_), {op_, rank, bucket});
  }
}

void MessageRing::send(int rank, int bucket, const void* slice, size_t bytes, size_t offset,
                       bool is_last) {
  // Until then the signal stays that of the slot's message before.
  const uint64_t before = std::max(epoch(bucket), uint64_t(window_)) - uint64_t(window_);
  const auto put = [&](uint64_t raised) {
    dp_.put(rank, *slots_, message_offset(dp_.rank(), bucket) + offset, slice, bytes,
            arrival(dp_.rank(), bucket), raised);
  };
  if (!is_last) return put(before);
  const ScopedSend span(dp_, op_, bucket, rank, stream_, int64_t(epoch(bucket)));
  put(epoch(bucket));
}

bool MessageRing::can_receive(int bucket) {
  if (is_enqueued_) {
    wait_for_arrivals(bucket);
    return true;
  }
  for (int hop = 1; hop < dp_.size(); ++hop) {
    if (dp_.read_signal(*slots_, arrival(source(hop), bucket)) < epoch(bucket)) return false;
  }
  return true;
}

void MessageRing::wait_for_arrival(int rank, int bucket) {
  const ScopedWait span(Phase::dp_wait, op_, bucket,
                        receive_from(dp_, rank, stream_, int64_t(epoch(bucket))));
  wait(arrival(rank, bucket), epoch(bucket), {op_, rank, bucket});
}

void MessageRing::wait_for_arrivals(int bucket) {
  for (int hop = 1; hop < dp_.size(); ++hop) wait_for_arrival(source(hop), bucket);
}

void MessageRing::acknowledge(int rank, int bucket) {
  dp_.put(rank, *slots_, 0, nullptr, 0, acknowledgement(dp_.rank()), epoch(bucket));
}

}  // namespace tandem
