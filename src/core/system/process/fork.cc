#include "core/system/process/fork.h"

#include <fmt/format.h>
#include <omp.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>

#include "tandem/error.h"

namespace tandem {
namespace {

std::atomic<uint64_t> forks{0};
std::atomic<bool> had_threads{false};
thread_local bool lost_team = false;

void before_fork() {
  struct stat tasks {};
  had_threads = stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink > 3;
}

void in_child() {
  ++forks;
  lost_team |= had_threads;
  if (lost_team) omp_set_num_threads(1);
}

[[maybe_unused]] const int registered = pthread_atfork(before_fork, nullptr, in_child);

}  // namespace

uint64_t fork_count() {
  return forks.load(std::memory_order_relaxed);
}

void ProcessMark::require(std::string_view op) const {
  if (is_this_process()) return;
  throw InvalidArgument(
      fmt::format("{}: its communicator belongs to the process that forked this one, {}: expected "
                  "one of a world that this process has made",
                  op, getpid()));
}

bool lost_its_team() {
  return lost_team;
}

}  // namespace tandem
