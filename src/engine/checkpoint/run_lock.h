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

  /// To be called before anything is saved: OUT may have been removed, and made again by another
  /// run. Makes and locks a folder that is gone, and then returns true: what the run has written
  /// before is gone, too. Throws IoError or ConfigError where OUT is another run's now.
  bool renew();

 private:
  void lock();
  bool is_current() const;

  std::string out_, path_;
  std::optional<FileDescriptor> folder_, file_;
};

/// Throws ConfigError where OUT already holds a run.
void require_no_run(const std::string& out);

}  // namespace tandem
