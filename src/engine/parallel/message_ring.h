// Ring of messages between data-parallel ranks, a message of every bucket of a step from and to
// every rank. A slot holds one bucket; there are a few, or a small part of the model. Receivers
// acknowledge every message they have read, and a sender is at most a ring ahead. Message n is in
// slot n % slots; numbers continue from step to step.
//
// On GPUs messages are sent by copy engines after the work enqueued on dp's stream. The waits are
// enqueued on it, too, or are the host's. CPU ranks can also look whether they would wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/parallel/sharded/buckets.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class MessageRing {
 public:
  /// Max buckets in flight: on a GPU 4. CPU ranks look for messages only between operators, so
  /// theirs are 8, or fewer, but at least 4, if that is more than 8 MiB of f32; in a ring that
  /// keeps no messages they are 1/48 of all buckets if that is more.
  static int max_window(int64_t buckets, int64_t bucket_elements, bool is_staged, bool on_gpu);

  /// `op`: name in errors and spans, a literal. `staged_messages`: encoded messages of a slot to
  /// keep until they are acknowledged; 0: messages are sent from where they are. Collective over
  /// `dp`; allocates nothing for one rank.
  MessageRing(Communicator& dp, const char* op, const Buckets& buckets, size_t message_bytes,
              int staged_messages, bool host_waits = false);

  int window() const { return window_; }
  size_t bytes() const { return staging_.bytes() + (slots_ ? slots_->bytes() : 0); }
  bool is_staged() const { return staging_.bytes() > 0; }
  /// Whether messages and waits are enqueued: GPUs.
  bool is_enqueued() const { return is_enqueued_; }
  /// From now on, on GPUs: waits are the host's, or enqueued.
  void set_host_waits(bool host_waits) { host_waits_ = host_waits; }
  /// Whether can_send and can_receive block: GPUs with waits of the host.
  bool blocks() const { return is_enqueued_ && host_waits_; }
  /// Staged message `index` of a bucket.
  std::byte* staged(int index, int bucket) {
    return staging_.data() + size_t(index * window_ + slot(bucket)) * message_bytes_;
  }
  /// Received message of `rank`.
  std::byte* received(int rank, int bucket) const {
    return slots_->local() + message_offset(rank, bucket);
  }

  /// Whether all ranks have read the message whose slot the bucket takes; GPUs wait for that.
  bool can_send(int bucket);
  void wait_for_room(int bucket);
  /// Sends `bytes` to `offset` of the message; it has arrived with its last slice.
  void send(int rank, int bucket, const void* slice, size_t bytes, size_t offset = 0,
            bool is_last = true);
  /// Whether the messages of all ranks have arrived; GPUs wait for them.
  bool can_receive(int bucket);
  void wait_for_arrival(int rank, int bucket);
  void wait_for_arrivals(int bucket);
  void acknowledge(int rank, int bucket);
  /// Ends a step.
  void next_step() { begin_ += uint64_t(buckets_); }

  /// Destination and source at `hop` of 1 … ranks - 1.
  int destination(int hop) const;
  int source(int hop) const;

 private:
  void make_streams();
  void wait(int signal, uint64_t epoch, const WaitSite& site);
  int slot(int bucket) const { return int((begin_ + uint64_t(bucket)) % uint64_t(window_)); }
  size_t message_offset(int rank, int bucket) const {
    return size_t(rank * window_ + slot(bucket)) * message_bytes_;
  }
  int arrival(int rank, int bucket) const { return rank * window_ + slot(bucket); }
  int acknowledgement(int rank) const { return dp_.size() * window_ + rank; }
  uint64_t epoch(int bucket) const { return begin_ + uint64_t(bucket) + 1; }

  Communicator& dp_;
  const char* op_;
  uint32_t stream_;  // of messages in a trace
  bool is_enqueued_;
  int buckets_, window_;
  bool host_waits_;
  size_t message_bytes_;
  uint64_t begin_ = 0;  // number of the step's first message
  std::shared_ptr<SymmetricBuffer> slots_;
  Memory staging_;  // on dp's device
};

}  // namespace tandem
