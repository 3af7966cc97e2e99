#include "core/system/process/ending_process.h"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <string>

namespace tandem {
namespace {

/// Fields of /proc/PID/status that say how a process is.
struct ProcessStatus {
  bool found = false;
  char state = '?';
  pid_t parent = 0;
  uint64_t pending = 0;  ///< signals
};

ProcessStatus read_status(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  ProcessStatus status;
  for (std::string field; file >> field;) {
    uint64_t signals = 0;
    if (field == "State:") file >> status.state;
    if (field == "PPid:") file >> status.parent;
    if (field == "SigPnd:" || field == "ShdPnd:") file >> std::hex >> signals >> std::dec;
    status.pending |= signals;
    status.found = true;
  }
  return status;
}

}  // namespace

bool is_ending(pid_t pid) {
  constexpr int kMaxAncestors = 16;
  constexpr uint64_t kKill = uint64_t{1} << (SIGKILL - 1);
  for (int i = 0; i < kMaxAncestors && pid > 1; ++i) {
    const ProcessStatus status = read_status(pid);
    if (!status.found) return ::kill(pid, 0) != 0 && errno == ESRCH;
    if (status.state == 'Z' || status.state == 'X' || (status.pending & kKill) != 0) return true;
    pid = status.parent;
  }
  return false;
}

}  // namespace tandem
