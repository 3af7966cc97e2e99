// Exclusive lock of a run's output folder.
#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "core/system/file_descriptor.h"

namespace tandem {

/// Holds OUT/NAME for its lifetime; the system releases the lock when the process ends, even if
/// killed.
class RunLock {
 public:
  /// Throws ConfigError naming the folder and the process that holds the lock, if it still does
  /// after `patience_s` seconds, or 15 for one that is ending. Without support for locks in the
  /// file system, acquires none.
  explicit RunLock(const std::string& out, double patience_s = 1, const char* name = ".lock");
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Throws ConfigError if OUT now belongs to another run, which has locked it, or has replaced the
  /// folder and may have ended: nothing may be written there.
  void check() const;
  /// Whether OUT and the lock are those that were locked.
  bool is_locked() const;
  /// Must be called before each save, as OUT may have been removed. Recreates and locks a removed
  /// folder and then returns true: files written earlier are lost. Throws as `check`, or IoError.
  bool renew();

 private:
  void lock(double patience_s);
  std::string read_holder() const;
  bool is_current() const;
  void check_owner() const;

  mutable std::mutex mutex_;  // checkpoints are written by another thread than logs
  std::string out_, path_;
  std::optional<FileDescriptor> folder_, file_;
};

/// Throws ConfigError if OUT already holds a run.
void require_no_run(const std::string& out);

}  // namespace tandem
