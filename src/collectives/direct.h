// Fast path for ranks of one address space: peers read and write a rank's tensor in place, without
// staging.
//
//   Direct direct(call);        opens this rank's tensor to the call
//   direct.enter(tensor, sent); envelope with its address, check, use of every peer's tensor
//   ... direct.of(rank) ...     must not wait for any rank
//   direct.finish();            releases and signals all, returns once all have released this
//   tensor
//
// A rank may leave early, with Timeout or Aborted, and free its tensor. So each tensor has a use
// count: a word with the number of the call it is open for and the number of peers that use it.
// Leaving closes it and waits for the users, which never wait; a peer that finds it closed throws
// Aborted.
#pragma once

#include <atomic>
#include <vector>

#include "collectives/call.h"

namespace tandem::collectives {

class Direct {
 public:
  explicit Direct(Call& call);
  ~Direct();
  Direct(const Direct&) = delete;
  Direct& operator=(const Direct&) = delete;

  /// `sent`: bytes that peers will read here and this rank will write there. Throws what
  /// `Call::check` throws, and Aborted when a peer has left.
  void enter(const void* tensor, size_t sent);
  std::byte* of(int rank) const { return tensors_[size_t(rank)]; }
  void finish();

 private:
  void release();

  Call& call_;
  std::vector<std::byte*> tensors_;
  std::vector<int> acquired_;
};

/// Bytes processed before they are passed on, while they are still in the cache.
constexpr size_t kDirectBlock = size_t(64) << 10;

}  // namespace tandem::collectives
