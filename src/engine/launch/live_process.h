// Process that serves the live page of a run which this one trains or launches
// (engine/serve/http/live_server.h).
#pragma once

#include <sys/types.h>

#include <string>

namespace tandem {

/// Ends with its process, not with forks of it. If the page cannot be served, the process says so,
/// and the run continues.
class LiveProcess {
 public:
  /// `address`: as parse_listen_address takes it; empty: no process. Construct it before signals
  /// are blocked. Throws InvalidArgument for another address.
  LiveProcess(const std::string& address, const std::string& dir);
  ~LiveProcess();
  LiveProcess(const LiveProcess&) = delete;
  LiveProcess& operator=(const LiveProcess&) = delete;

 private:
  pid_t pid_ = -1, parent_;
};

}  // namespace tandem
