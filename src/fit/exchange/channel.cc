// Slots alternate between two halves of the buffer. A rank that begins exchange k + 2 has received
// the signal of exchange k + 1 from every rank, which these raise after they have read what came in
// exchange k: the slots may be written again.
#include "fit/exchange/channel.h"

#include <algorithm>

#include "schedule/ring.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

/// Scope at whose end, also after an error, no put still reads memory made before it.
class Flush {
 public:
  explicit Flush(Communicator& comm) : comm_(comm) {}
  ~Flush() {
    try {
      comm_.flush();
    } catch (const Error&) {
      // The world has failed; the transport releases its sources before it reports that.
    }
  }
  Flush(const Flush&) = delete;
  Flush& operator=(const Flush&) = delete;

 private:
  Communicator& comm_;
};

}  // namespace

int Channel::rank_of(int node) const {
  return node == kServer ? 0 : schedule::owner_of(clients_, comm_.size(), node);
}

size_t Channel::slot(int source) const {
  return (size_t(epoch_ % 2) * size_t(comm_.size()) + size_t(source)) * capacity_;
}

std::vector<size_t> Channel::offsets(std::span<const Message> plan) {
  const size_t ranks = size_t(comm_.size());
  std::vector<size_t> used(ranks * ranks, 0), offsets;
  offsets.reserve(plan.size());
  for (const Message& message : plan) {
    size_t& pair = used[size_t(rank_of(message.from)) * ranks + size_t(rank_of(message.to))];
    offsets.push_back(pair);
    pair += (message.bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
  }
  const size_t largest = *std::max_element(used.begin(), used.end());
  if (largest > capacity_) {
    capacity_ = largest;
    buffer_ = comm_.allocate(2 * ranks * capacity_, comm_.size());
    epoch_ = 0;
  }
  return offsets;
}

void Channel::exchange(std::span<const Message> plan, const Write& write, const Read& read) {
  if (plan.empty()) return;
  const std::vector<size_t> at = offsets(plan);
  ++epoch_;
  size_t outgoing = 0;
  for (const Message& message : plan) {
    if (is_local(message.from)) outgoing += message.bytes + sizeof(double);
  }
  std::vector<double> memory(outgoing / sizeof(double) + 1);
  const Flush flush(comm_);
  auto* next = reinterpret_cast<std::byte*>(memory.data());
  for (size_t i = 0; i < plan.size(); ++i) {
    const Message& message = plan[i];
    if (!is_local(message.from)) continue;
    write(i, {next, message.bytes});
    put(message.to, *buffer_, slot(comm_.rank()) + at[i], {next, message.bytes}, comm_.rank(),
        epoch_ - 1);
    next += (message.bytes + sizeof(double) - 1) / sizeof(double) * sizeof(double);
  }
  for (int step = 0; step < comm_.size(); ++step) {
    const int peer = (comm_.rank() + step) % comm_.size();
    comm_.put(peer, *buffer_, 0, nullptr, 0, comm_.rank(), epoch_);
  }
  for (int step = 0; step < comm_.size(); ++step) {
    const int peer = (comm_.rank() + step) % comm_.size();
    comm_.wait(*buffer_, peer, epoch_, {"fit exchange", peer});
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    const Message& message = plan[i];
    if (!is_local(message.to)) continue;
    read(i, {buffer_->local() + slot(rank_of(message.from)) + at[i], message.bytes});
  }
  comm_.flush();
}

}  // namespace tandem::fit
