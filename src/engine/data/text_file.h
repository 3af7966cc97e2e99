// A training file that is read where it lies, and that must stay as it was when training began.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
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
  /// `file`: open for reading; `path` names it in messages.
  TextFile(FileDescriptor file, std::string path);
  uint64_t size() const { return size_; }
  /// The same text for two ranks of a machine that have the same file open.
  std::string identity() const;
  /// XXH3-64 of the content that it must keep.
  void expect(uint64_t hash) { hash_ = hash; }
  /// That of the content as it is. Reads all of it; `advanced` is told of every block. Throws
  /// IoError.
  uint64_t hash_now(const std::function<void(size_t bytes)>& advanced) const;

  /// Throws IoError when the content is no longer what it was. That is found by the file's times
  /// and size, and the hash decides.
  void read(uint64_t offset, std::span<std::byte> out) const;
  /// `hash`: what `hash_now` gave. Throws IoError when the content is no longer what it was.
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
  mutable std::mutex mutex_;  // of stamp_
  mutable Stamp stamp_;       // when the content was last found to be right
  uint64_t size_ = 0, hash_ = 0;
};

}  // namespace tandem
