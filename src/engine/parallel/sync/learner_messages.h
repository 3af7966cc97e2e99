// Messages of learners, one of each learner a round: bytes that a learner writes in place and puts
// into the memory of all others, where they wait for it.
//
// On GPUs messages are in device memory, and copy engines send them after the work that is enqueued
// on the learners' stream; the host waits for them. Between GPUs that do not reach each other's
// memory, as those of several hosts, messages go through the memory of the hosts, which send them
// as CPU ranks do: a host waits until its message is encoded, and copies those that have arrived.
//
// Rounds are counted from 1. The message of a round may be written while the others still read
// those of the round before, not before all of these have arrived: a slot is used again two rounds
// later.
//
// With a quorum a round ends when the messages of so many learners are there. Learner 0 decides
// which count, all that it has at that moment, and puts their set to the others, so that all
// learners combine the same ones. A learner that comes later reads the same set. It can be at most
// one round behind: the others wait for its message before they begin the next round.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/exec.h"
#include "tandem/communicator.h"

namespace tandem {

class LearnerMessages {
 public:
  /// Rounds whose messages are in memory.
  static constexpr int kSlots = 2;
  /// `max_bytes` of a message, the same in all learners. `quorum`: at most the learners. `name`: of
  /// waits, in spans and errors; it and `learners` must outlive this object. `learners` must not be
  /// used between `send_in_steps` and the next `receive` or `end_sending`. Collective.
  LearnerMessages(Communicator& learners, const char* name, size_t max_bytes, int quorum);
  /// Bytes that a rank allocates for messages of at most `max_bytes`.
  static size_t buffer_bytes(int learners, size_t max_bytes);
  /// Bytes that this rank has allocated, on the device of an Exec.
  size_t bytes() const { return hosts_ ? on_device_.bytes() : buffer_->bytes(); }

  /// Begins a round. Returns the memory of this learner's message. With a quorum it waits for
  /// learners that are further behind. Throws Timeout or Aborted.
  std::byte* begin_round();
  /// Sends the first `bytes` of this learner's message to all others.
  void send(size_t bytes);
  /// Sends it while steps are made; on CPU ranks on a thread, by small chunks, so that the ranks'
  /// messages of each step, which share the link, need not wait for all of it.
  void send_in_steps(size_t bytes);
  /// Waits for the messages of this round, as long as this learner has not since the last call, and
  /// the communicator's deadline: it may have made its steps faster than another. Returns those
  /// that count in the order of the learners; they are
  /// valid until the next round but one begins. `fragment`: of the model, in spans and errors.
  /// Throws Timeout or Aborted.
  /// `late`: learners that do not count, of which the same are given in all learners; if given, all
  /// others count.
  std::vector<const std::byte*> receive(int fragment,
                                        const std::optional<std::vector<int>>& late = {});
  /// Learners whose messages counted in the last round received, in order.
  const std::vector<int>& counted() const { return counted_; }
  /// This learner's message of the round, until the next but one begins.
  const std::byte* local() const { return message(learners_.rank()); }
  /// Waits for the thread of `send_in_steps`, if it runs. Throws what `send` does.
  void end_sending();
  /// Bytes sent by this rank since the last call.
  uint64_t take_sent() { return std::exchange(sent_bytes_, 0); }

 private:
  void make_streams();
  size_t message_offset(int learner) const;
  std::byte* message(int learner) const;
  void copy_message(int learner, size_t bytes, bool to_host) const;
  void finish_message(size_t bytes);
  void put(size_t bytes, size_t max_chunk);
  bool has_quorum() const { return quorum_ < learners_.size(); }
  bool has_arrived(int learner) const;
  void await(int learner, uint64_t round, int fragment);
  void await_quorum(int fragment);
  void end_wait(const std::vector<int>& missing, int fragment);
  void decide(int fragment, const std::optional<std::vector<int>>& late);

  const Exec exec_;
  const std::unique_ptr<Communicator> hosts_;  // if messages go through their memory
  Communicator& learners_;                     // of the sending thread while it runs
  const char* const name_;
  const int quorum_;
  const bool is_enqueued_;  // by puts: GPUs
  const size_t room_;       // of a message
  const size_t decisions_;  // offset of those of kSlots rounds: a byte a learner, 1 if it counts
  std::shared_ptr<SymmetricBuffer> buffer_;
  const Memory on_device_;  // of all messages, if they go through the hosts' memory
  uint64_t round_ = 0;
  uint64_t sent_bytes_ = 0;
  std::vector<int> counted_;
  std::chrono::steady_clock::time_point received_at_ = std::chrono::steady_clock::now();
  std::future<void> sending_;  // last: its thread uses the members above
};

}  // namespace tandem
