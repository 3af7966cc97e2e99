#include "engine/parallel/sync/learner_messages.h"

#include <algorithm>

#include "core/system/process/clock.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr size_t kChunkBytes = 16 << 10;  // of what is sent during steps
constexpr size_t kMessageAlignment = 16;  // of a message

/// Scope in which waits have a longer deadline.
class LongerDeadline {
 public:
  LongerDeadline(Communicator& ranks, double more_s) : ranks_(ranks), usual_(ranks.deadline()) {
    ranks_.set_deadline(usual_ + more_s);
  }
  ~LongerDeadline() { ranks_.set_deadline(usual_); }
  LongerDeadline(const LongerDeadline&) = delete;
  LongerDeadline& operator=(const LongerDeadline&) = delete;

 private:
  Communicator& ranks_;
  const double usual_;
};

}  // namespace

LearnerMessages::LearnerMessages(Communicator& learners, const char* name, size_t max_bytes)
    : learners_(learners),
      name_(name),
      room_((max_bytes + kMessageAlignment - 1) / kMessageAlignment * kMessageAlignment),
      buffer_(learners.allocate(
          std::max(kSlots * size_t(learners.size()) * room_, kMessageAlignment), learners.size())) {
}

std::byte* LearnerMessages::begin_round() {
  ++round_;
  return message(learners_.rank());
}

/// Memory of a learner's message of this round.
std::byte* LearnerMessages::message(int learner) const {
  const size_t slot = size_t(round_ % kSlots) * size_t(learners_.size());
  return buffer_->local() + (slot + size_t(learner)) * room_;
}

void LearnerMessages::send(size_t bytes) {
  sent_bytes_ += bytes * uint64_t(learners_.size() - 1);
  put(bytes, bytes);
}

void LearnerMessages::send_in_steps(size_t bytes) {
  sent_bytes_ += bytes * uint64_t(learners_.size() - 1);
  sending_ = std::async(std::launch::async, [this, bytes] { put(bytes, kChunkBytes); });
}

/// Chunks but the last leave before the next one is begun.
void LearnerMessages::put(size_t bytes, size_t max_chunk) {
  const int learner = learners_.rank();
  const std::byte* const local = message(learner);
  const auto offset = size_t(local - buffer_->local());
  for (size_t begin = 0; begin < bytes; begin += max_chunk) {
    const size_t count = std::min(max_chunk, bytes - begin);
    const bool is_last = begin + count == bytes;
    for (int hop = 1; hop < learners_.size(); ++hop) {
      learners_.put((learner + hop) % learners_.size(), *buffer_, offset + begin, local + begin,
                    count, learner, is_last ? round_ : round_ - 1);
    }
    if (!is_last) learners_.flush();
  }
}

std::vector<const std::byte*> LearnerMessages::receive(int fragment) {
  if (sending_.valid()) {
    const ScopedWait span(Phase::sync_wait, name_, fragment);
    end_sending();
  }
  const LongerDeadline longer(learners_, seconds_since(received_at_));
  std::vector<const std::byte*> messages;
  for (int learner = 0; learner < learners_.size(); ++learner) {
    if (learner != learners_.rank()) {
      const ScopedWait span(Phase::sync_wait, name_, fragment);
      learners_.wait(*buffer_, learner, round_, {name_, learner, fragment});
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
