// A training file that is read where it lies, and that must stay as it was when training began.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "core/file_descriptor.h"

namespace tandem {

/// Read through the system rather than mapped: a file that is cut is then an IoError with its name,
/// where a mapped one would end the process. A file that is replaced by another of its name stays
/// readable. Calls may come from any thread.
class TextFile {
 public:
  /// `file`: open for reading; `path` names it in messages. Reads it once, for its hash.
  TextFile(FileDescriptor file, std::string path);
  uint64_t size() const { return size_; }
  /// XXH3-64 of the content.
  uint64_t hash() const { return hash_; }

  /// Throws IoError when the content is no longer what it was. That is found by the file's times
  /// and size, and the hash decides.
  void read(uint64_t offset, std::span<std::byte> out) const;
  /// Reads all of it. Throws IoError when the content is no longer what it was.
  void verify() const;

 private:
  struct Stamp {
    int64_t size = 0, modified_ns = 0, changed_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp() const;
  uint64_t hash_now() const;
  [[noreturn]] void fail() const;

  FileDescriptor file_;
  std::string path_;
  mutable std::mutex mutex_;  // of stamp_
  mutable Stamp stamp_;       // when the content was last found to be right
  uint64_t size_ = 0, hash_ = 0;
};

}  // namespace tandem
