// The short way for ranks of one address space: peers read and write a rank's tensor where it is,
// and nothing is staged.
//
//   Direct direct(call);        opens this rank's tensor to the call
//   direct.enter(tensor);       envelope with its address, check, and a hold on every peer's tensor
//   ... direct.of(rank) ...     no waiting for anybody in here
//   direct.finish();            lets go, tells all, returns once all have let go of this one
//
// A rank may leave early, with Timeout or Aborted, and free its tensor. So each tensor has a gate:
// a word that holds the number of the call it is open for and how many peers hold it. Leaving
// closes the gate and waits for those inside, who never wait; a peer that finds it closed throws
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

  /// Throws what `Call::check` throws, and Aborted when a peer has left.
  void enter(const void* tensor);
  std::byte* of(int rank) const { return tensors_[size_t(rank)]; }
  void finish();

 private:
  void let_go();

  Call& call_;
  std::vector<std::byte*> tensors_;
  std::vector<int> held_;
};

/// How many bytes are worked on before they go elsewhere: they are still in the cache then.
constexpr size_t kDirectBlock = size_t(64) << 10;

}  // namespace tandem::collectives
