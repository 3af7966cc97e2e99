// What ranks must agree on around symmetric memory, whoever it belongs to: whether all have got
// theirs, and when it may be freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

/// What all ranks throw together, knowing of each other: the next call finds them even.
class AgreedError : public IoError {
 public:
  using IoError::IoError;
};

/// The same, of arguments.
class AgreedArgument : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

using Blobs = std::vector<std::vector<std::byte>>;

/// What an exchange of texts has brought, an empty one from who succeeded: "rank 2: no memory" of
/// the first rank that did not; empty where all did.
std::string first_failure(const Blobs& texts);

/// The numbers that are in every rank's blob, in order. Each blob: numbers in order.
std::vector<uint64_t> in_all(const Blobs& numbers);

/// Memory that this rank has dropped and a peer may still write to. Ranks drop buffers in any
/// order, so nothing is freed until an exchange has shown that all ranks have dropped the same one;
/// then all of them free the same ones, in the same order. Any thread may drop a buffer, as a
/// garbage collector's does.
template <typename Resource>
class Retired {
 public:
  /// The number of a new allocation: the same on all ranks, which allocate in the same order.
  uint64_t issue() { return next_++; }
  void add(uint64_t number, Resource resource) {
    const std::lock_guard lock(mutex_);
    kept_.emplace(number, std::move(resource));
  }
  /// What the other ranks are told.
  std::vector<uint64_t> numbers() const {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> all;
    for (const auto& entry : kept_) all.push_back(entry.first);
    return all;
  }
  /// What all ranks have told that they have dropped, in the order of allocation.
  std::vector<Resource> take(const Blobs& told) {
    const std::lock_guard lock(mutex_);
    std::vector<Resource> taken;
    for (const uint64_t number : in_all(told)) {
      taken.push_back(std::move(kept_.extract(number).mapped()));
    }
    return taken;
  }
  /// All of it, where nobody is left to agree with.
  std::vector<Resource> take_all() {
    const std::lock_guard lock(mutex_);
    std::vector<Resource> taken;
    for (auto& entry : kept_) taken.push_back(std::move(entry.second));
    kept_.clear();
    return taken;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, Resource> kept_;
  uint64_t next_ = 0;
};

}  // namespace tandem
