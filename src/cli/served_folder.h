// `tandem serve DIR` as a process of its own, for `tandem bench serve`.
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "engine/launch/processes/launched_process.h"

namespace tandem::cli {

class ServedFolder {
 public:
  /// Starts a server with these options of `serve`, and waits until it is ready. Throws IoError if
  /// it ends before; its errors are on standard error.
  ServedFolder(const std::string& folder, const std::vector<std::string>& options);
  ServedFolder(const ServedFolder&) = delete;
  ~ServedFolder();

  const std::string& url() const { return url_; }
  /// Seconds from its start.
  double ready_s() const { return ready_s_; }

 private:
  /// Passes on what the server prints until its first line with the URL, or its end.
  void wait_for_url(const std::string& folder);

  LaunchedProcess process_;
  std::string url_;
  double ready_s_ = 0;
  std::jthread reader_;  ///< of what it prints later
};

}  // namespace tandem::cli
