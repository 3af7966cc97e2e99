// A process that fork made of one that uses this library. It has one thread, a copy of the memory,
// and the parent's sockets, shared memory and OpenMP teams without their threads. None of them may
// be used there.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem {

/// How many forks lie between this process and the first: another number than at construction means
/// that a thing is the parent's.
uint64_t fork_count();

/// This process's number, to compare later.
class ProcessMark {
 public:
  bool is_this_process() const { return count_ == fork_count(); }
  /// Throws InvalidArgument naming `op` in a forked child.
  void require(std::string_view op) const;

 private:
  uint64_t count_ = fork_count();
};

/// Whether this thread forked while other threads lived, which may have been its OpenMP team: a
/// parallel region of several threads would wait for them for ever.
bool lost_its_team();

}  // namespace tandem
