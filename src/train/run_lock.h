// One run at a time writes to a folder.
#pragma once

#include <optional>
#include <string>

#include "core/file_descriptor.h"

namespace tandem {

/// Holds OUT/.lock while it lives; the system lets go of it when the process ends, however it does.
class RunLock {
 public:
  /// Throws ConfigError naming the folder and the process that holds it. Where the file system
  /// knows no locks, nothing is held.
  explicit RunLock(const std::string& out);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  bool is_current() const;

  std::string path_;
  std::optional<FileDescriptor> file_;
};

}  // namespace tandem
