#include "engine/parallel/sync/learner_messages.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "comm/exec.h"
#include "comm/world/host_ranks.h"
#include "core/system/process/clock.h"
#include "engine/config/device_traits.h"
#include "observe/recorder.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kChunkBytes = 16 << 10;  // of what is sent during steps
constexpr size_t kMessageAlignment = 16;  // of a message
constexpr int kNoFragment = -1;
constexpr std::chrono::microseconds kPollInterval{200};
constexpr double kMinDeadline = 0.001;  // of a communicator, seconds

constexpr size_t aligned_room(size_t bytes) {
  return (bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment;
}

/// Whether every rank reaches every other's memory, as GPUs of one host do. The same on every rank.
/// Collective.
bool reach_each_other(Communicator& ranks) {
  const auto probe = ranks.allocate(kMessageAlignment, 1);
  bool reaches_all = true;
  for (int rank = 0; rank < ranks.size(); ++rank) reaches_all &= probe->peer(rank) != nullptr;
  const std::byte verdict{reaches_all};
  const auto verdicts = ranks.exchange({&verdict, 1}, "reach_each_other");
  return std::ranges::all_of(verdicts, [](const std::vector<std::byte>& of_rank) {
    return of_rank.front() != std::byte(0);
  });
}

/// Ranks on the hosts of GPUs that do not reach each other, or whose hosts decide which messages
/// count; else nullptr. Collective.
std::unique_ptr<Communicator> split_hosts(Communicator& learners, int quorum) {
  if (device_traits(make_exec(learners)).is_host) return nullptr;
  if (quorum == learners.size() && reach_each_other(learners)) return nullptr;
  auto hosts = split_on_host(learners);
  hosts->set_deadline(learners.deadline());
  return hosts;
}

/// Scope in which waits have another deadline.
class ScopedDeadline {
 public:
  ScopedDeadline(Communicator& ranks, double seconds) : ranks_(ranks), usual_(ranks.deadline()) {
    ranks_.set_deadline(seconds);
  }
  ~ScopedDeadline() { ranks_.set_deadline(usual_); }
  ScopedDeadline(const ScopedDeadline&) = delete;
  ScopedDeadline& operator=(const ScopedDeadline&) = delete;

 private:
  Communicator& ranks_;
  const double usual_;
};

}  // namespace

LearnerMessages::LearnerMessages(Communicator& learners, const char* name, size_t max_bytes,
                                 int quorum)
    : exec_(make_exec(learners)),
      hosts_(split_hosts(learners, quorum)),
      learners_(hosts_ ? *hosts_ : learners),
      name_(name),
      quorum_(quorum),
      is_enqueued_(!device_traits(exec_).is_host && !hosts_),
      room_(aligned_room(max_bytes)),
      decisions_(kSlots * size_t(learners.size()) * room_),
      buffer_(learners_.allocate(buffer_bytes(learners.size(), max_bytes), learners.size() + 1)),
      on_device_(hosts_ ? decisions_ : 0, exec_.device),
      counted_(size_t(learners.size())) {
  std::iota(counted_.begin(), counted_.end(), 0);
  if (is_enqueued_) make_streams();
}

size_t LearnerMessages::buffer_bytes(int learners, size_t max_bytes) {
  const size_t messages = kSlots * size_t(learners);
  return messages * aligned_room(max_bytes) + std::max(messages, kMessageAlignment);
}

/// Sends zeros and raises no signal, as MessageRing does: the first put makes a stream, which work
/// of another rank that waits on a GPU that they share would delay.
void LearnerMessages::make_streams() {
  for (int learner = 0; learner < learners_.size(); ++learner) {
    if (learner == learners_.rank()) continue;
    learners_.put(learner, *buffer_, 0, buffer_->local(), kMessageAlignment, learners_.rank(), 0);
  }
  learners_.flush();
  learners_.barrier(name_);
}

std::byte* LearnerMessages::begin_round() {
  const ScopedDeadline longer(learners_, learners_.deadline() + seconds_since(received_at_));
  for (int learner = 0; learner < learners_.size() && has_quorum(); ++learner) {
    if (learner != learners_.rank()) await(learner, round_, kNoFragment);
  }
  ++round_;
  return message(learners_.rank());
}

/// Position of a learner's message of this round.
size_t LearnerMessages::message_offset(int learner) const {
  const size_t slot = size_t(round_ % kSlots) * size_t(learners_.size());
  return (slot + size_t(learner)) * room_;
}

/// Its memory, where it is encoded and decoded.
std::byte* LearnerMessages::message(int learner) const {
  return (hosts_ ? on_device_.data() : buffer_->local()) + message_offset(learner);
}

/// Copies a message between a GPU and its host's memory.
void LearnerMessages::copy_message(int learner, size_t bytes, bool to_host) const {
  const Tensor host(buffer_->local() + message_offset(learner), DType::u8, {int64_t(bytes)});
  const Tensor device(message(learner), DType::u8, {int64_t(bytes)}, exec_.device);
  to_host ? copy(exec_, device, host) : copy(exec_, host, device);
}

/// Makes this learner's message ready to be sent.
void LearnerMessages::finish_message(size_t bytes) {
  sent_bytes_ += bytes * uint64_t(learners_.size() - 1);
  if (hosts_) copy_message(learners_.rank(), bytes, true);
}

void LearnerMessages::send(size_t bytes) {
  finish_message(bytes);
  put(bytes, bytes);
}

void LearnerMessages::send_in_steps(size_t bytes) {
  if (is_enqueued_) return send(bytes);
  finish_message(bytes);
  sending_ = std::async(std::launch::async, [this, bytes] { put(bytes, kChunkBytes); });
}

/// Chunks but the last leave before the next one is begun.
void LearnerMessages::put(size_t bytes, size_t max_chunk) {
  const int learner = learners_.rank();
  const size_t at = message_offset(learner);
  for (size_t begin = 0; begin < bytes; begin += max_chunk) {
    const size_t count = std::min(max_chunk, bytes - begin);
    const bool is_last = begin + count == bytes;
    for (int hop = 1; hop < learners_.size(); ++hop) {
      learners_.put((learner + hop) % learners_.size(), *buffer_, at + begin,
                    buffer_->local() + at + begin, count, learner, is_last ? round_ : round_ - 1);
    }
    if (!is_last) learners_.flush();
  }
}

/// Whether the learner's message of this round is here.
bool LearnerMessages::has_arrived(int learner) const {
  return learner == learners_.rank() || learners_.read_signal(*buffer_, learner) >= round_;
}

void LearnerMessages::await(int learner, uint64_t round, int fragment) {
  const ScopedWait span(Phase::sync_wait, name_, fragment);
  learners_.wait(*buffer_, learner, round, {name_, learner, fragment});
}

/// Waits until enough messages are here.
void LearnerMessages::await_quorum(int fragment) {
  const ScopedWait span(Phase::sync_wait, name_, fragment);
  const auto begin = std::chrono::steady_clock::now();
  while (true) {
    std::vector<int> missing;
    for (int learner = 0; learner < learners_.size(); ++learner) {
      if (!has_arrived(learner)) missing.push_back(learner);
    }
    if (learners_.size() - int(missing.size()) >= quorum_) return;
    if (seconds_since(begin) > learners_.deadline()) end_wait(missing, fragment);
    // Waits for no message, but throws if the ranks are aborted.
    learners_.wait(*buffer_, missing.front(), 0, {name_, missing.front(), fragment});
    std::this_thread::sleep_for(kPollInterval);
  }
}

/// Throws Timeout, which names all that are missing, unless the first of them is here by now.
void LearnerMessages::end_wait(const std::vector<int>& missing, int fragment) {
  const WaitSite site{name_, missing.front(), fragment};
  const double waited_s = learners_.deadline();
  try {
    const ScopedDeadline over(learners_, kMinDeadline);
    learners_.wait(*buffer_, site.peer, round_, site);
  } catch (const Timeout&) {
    const uint64_t seen = learners_.read_signal(*buffer_, site.peer);
    throw Timeout(Timeout(site, learners_.rank(), round_, seen, waited_s),
                  fmt::format("missing learners: {}", fmt::join(missing, ", ")));
  }
}

/// Sets counted_, in learner 0 by what has arrived.
void LearnerMessages::decide(int fragment, const std::optional<std::vector<int>>& late) {
  const size_t offset = decisions_ + (round_ % kSlots) * size_t(learners_.size());
  std::byte* const decision = buffer_->local() + offset;
  const int signal = learners_.size();
  if (learners_.rank() > 0) {
    const ScopedWait span(Phase::sync_wait, name_, fragment);
    learners_.wait(*buffer_, signal, round_, {name_, 0, fragment});
  } else {
    if (!late) await_quorum(fragment);
    for (int learner = 0; learner < learners_.size(); ++learner) {
      const bool counts = late ? std::ranges::find(*late, learner) == late->end() || learner == 0
                               : has_arrived(learner);
      decision[learner] = std::byte(counts);
    }
    for (int learner = 1; learner < learners_.size(); ++learner) {
      learners_.put(learner, *buffer_, offset, decision, size_t(learners_.size()), signal, round_);
    }
  }
  counted_.clear();
  for (int learner = 0; learner < learners_.size(); ++learner) {
    if (decision[learner] != std::byte(0)) counted_.push_back(learner);
  }
}

std::vector<const std::byte*> LearnerMessages::receive(
    int fragment, const std::optional<std::vector<int>>& late) {
  if (sending_.valid()) {
    const ScopedWait span(Phase::sync_wait, name_, fragment);
    end_sending();
  }
  const ScopedDeadline longer(learners_, learners_.deadline() + seconds_since(received_at_));
  if (has_quorum()) decide(fragment, late);
  std::vector<const std::byte*> messages;
  for (const int learner : counted_) {
    if (learner != learners_.rank()) {
      await(learner, round_, fragment);
      if (hosts_) copy_message(learner, room_, false);
    }
    messages.push_back(message(learner));
  }
  received_at_ = std::chrono::steady_clock::now();
  return messages;
}

void LearnerMessages::end_sending() {
  if (sending_.valid()) sending_.get();
}

}  // namespace tandem
