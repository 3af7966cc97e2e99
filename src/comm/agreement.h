// Agreement between ranks about symmetric memory, for any transport: whether every rank's
// allocation succeeded, and when memory may be freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

/// Error that all ranks throw together, so their epochs are still equal at the next call.
class AgreedError : public IoError {
 public:
  using IoError::IoError;
};

/// Invalid argument that all ranks report together, as AgreedError.
class AgreedArgument : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

using Blobs = std::vector<std::vector<std::byte>>;

/// First failure among the exchanged error texts (empty on success), such as "rank 2: no memory";
/// empty if all ranks succeeded.
std::string first_failure(const Blobs& texts);

/// Error text of `step`; empty if it succeeded. Includes running out of memory.
std::string failure_of(const std::function<void()>& step);

/// Runs `step` on every rank. If it throws an Error or runs out of memory on a rank, all ranks
/// throw AgreedError with the first such rank, `what` and the reason. Collective.
void agree_on(Communicator& comm, std::string_view what, const std::function<void()>& step);

/// Numbers present in every rank's blob, ascending. Each blob: ascending numbers.
std::vector<uint64_t> in_all(const Blobs& numbers);

/// Memory that this rank has dropped and a peer may still write to. Ranks drop buffers in any
/// order, so nothing is freed until an exchange has shown that all ranks have dropped the same
/// buffer; then all of them free the same buffers in the same order. Thread-safe: a garbage
/// collector's thread may drop a buffer.
template <typename Resource>
class Retired {
 public:
  /// Number of a new allocation: equal on all ranks, which allocate in the same order.
  uint64_t issue() { return next_++; }
  void add(uint64_t number, Resource resource) {
    const std::lock_guard lock(mutex_);
    offered_.emplace(number, std::move(resource));
  }
  /// Numbers to exchange with the other ranks.
  std::vector<uint64_t> numbers() const {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> all;
    for (const auto& entry : offered_) all.push_back(entry.first);
    return all;
  }
  /// Resources that all ranks have reported as dropped, in allocation order.
  std::vector<Resource> take(const Blobs& exchanged) {
    const std::lock_guard lock(mutex_);
    std::vector<Resource> taken;
    for (const uint64_t number : in_all(exchanged)) {
      taken.push_back(std::move(offered_.extract(number).mapped()));
    }
    return taken;
  }
  /// All resources; for use when no rank is left to agree with.
  std::vector<Resource> take_all() {
    const std::lock_guard lock(mutex_);
    std::vector<Resource> taken;
    for (auto& entry : offered_) taken.push_back(std::move(entry.second));
    offered_.clear();
    return taken;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, Resource> offered_;
  uint64_t next_ = 0;
};

}  // namespace tandem
