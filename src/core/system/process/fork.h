// Detection of forked processes. A child forked from a process that uses this library has one
// thread, a copy of the memory, and the parent's sockets, shared memory and OpenMP teams without
// their threads. None of them may be used there.
#pragma once

#include <cstdint>
#include <string_view>

namespace tandem {

/// Number of forks between this process and the first. If it differs from that at construction, an
/// object belongs to the parent.
uint64_t fork_count();

/// Fork count at construction, to compare later.
class ProcessMark {
 public:
  bool is_this_process() const { return count_ == fork_count(); }
  /// Throws InvalidArgument with `op` in a forked child.
  void require(std::string_view op) const;

 private:
  uint64_t count_ = fork_count();
};

/// Whether this thread forked while other threads existed, possibly its OpenMP team: a parallel
/// region of several threads would wait for them forever.
bool lost_its_team();

}  // namespace tandem
