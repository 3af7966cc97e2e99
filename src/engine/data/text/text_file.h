// Training file read from disk on demand; its content must not change during training.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>

#include "core/system/file_descriptor.h"

namespace tandem {

/// Read by system calls rather than mapped: a truncated file causes an IoError with its name, while
/// a mapped one would kill the process. A file replaced by another of its name stays readable.
/// Thread-safe.
class TextFile {
 public:
  /// `file`: open for reading; `path` names it in messages.
  TextFile(FileDescriptor file, std::string path);
  uint64_t size() const { return size_; }
  /// Equal for two ranks of a machine that have the same file open.
  std::string identity() const;
  /// Sets the expected XXH3-64 of the content.
  void expect(uint64_t hash) { hash_ = hash; }
  /// XXH3-64 of the current content. Reads all of it; calls `advanced` after every block. Throws
  /// IoError.
  uint64_t hash_now(const std::function<void(size_t bytes)>& advanced) const;

  /// Throws IoError if the content has changed: detected by the file's times and size, confirmed by
  /// the hash.
  void read(uint64_t offset, std::span<std::byte> out) const;
  /// Throws IoError if the content has changed. `hash`: result of `hash_now`.
  void verify(uint64_t hash) const;

 private:
  struct Stamp {
    int64_t size = 0, modified_ns = 0, changed_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  [[noreturn]] void fail() const;

  FileDescriptor file_;
  std::string path_;
  mutable std::mutex mutex_;  // guards stamp_
  mutable Stamp stamp_;       // at the last successful check of the content
  uint64_t size_ = 0, hash_ = 0;
};

}  // namespace tandem
