// File of training data of any size, identified by samples of its content: a run begins without
// reading all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/system/file_descriptor.h"
#include "engine/data/text/unpacked.h"

namespace tandem {

/// Bytes of a file.
struct FileRange {
  uint64_t begin = 0, size = 0;
};

/// Whether samples of a file of `size` bytes are less than all of it.
bool is_sampled(uint64_t size);
/// Sampled ranges of a file of `size` bytes: all of it up to 16 MiB, else 32 blocks of 64 KiB,
/// evenly spread from its first to its last byte. They begin at multiples of 64 bytes, except for
/// the last.
std::vector<FileRange> sampled_ranges(uint64_t size);

/// Files of training data that may stay open: half of the process's limit; the rest is for files of
/// the run and for sockets.
size_t max_open_files();

/// Bytes that reads of a compressed file return.
enum class Content : uint8_t { as_stored, unpacked };

/// Read by system calls rather than mapped: a truncated file causes an IoError with its name, while
/// a mapped one would kill the process. Thread-safe.
class DataFile {
 public:
  /// `stays_open`: holds a descriptor, so the file stays readable if another takes its name; else
  /// opens it for every read. With `unpacked` a gzip or zstd file stays open and is unpacked as far
  /// as it is read. Throws IoError.
  DataFile(const std::string& path, bool stays_open, Content content = Content::as_stored);
  const std::string& path() const { return path_; }
  uint64_t stored_bytes() const { return stamp_.size; }
  /// Bytes of the content, all of which is unpacked.
  uint64_t size() const { return reach(UINT64_MAX); }
  /// The smaller of `end` and the content's bytes, which are unpacked up to there.
  uint64_t reach(uint64_t end) const;
  /// nullptr: not compressed, or read as stored.
  Unpacked* unpacked() const { return unpacked_.get(); }
  /// Reads what another process has unpacked of the same file. Throws IoError.
  void adopt(const Unpacked::Handle& handle);
  Compression compression() const { return compression_; }
  /// Equal for two processes of a machine that opened the same file.
  std::string identity() const;
  /// At construction or the last check of the content, in nanoseconds since 1970.
  int64_t modified_ns() const;
  /// Throws IoError if the file is gone, has another size or was written to. A small one may be
  /// written to if its content stays the same.
  void read(uint64_t offset, std::span<std::byte> out) const;
  /// Reads the sampled ranges of the file as stored, passes them to `visit` in blocks and remembers
  /// their hash.
  using Visit = std::function<void(uint64_t offset, std::span<const std::byte>)>;
  void sample(const Visit& visit);
  /// XXH3-64 of the sampled ranges.
  uint64_t hash() const { return hash_; }
  /// XXH3-64 of the sampled ranges of the content: `hash()` unless it is unpacked.
  uint64_t content_hash() const;
  /// Reads the sampled ranges again. Throws IoError if they differ.
  void verify() const;

 private:
  struct Stamp {
    uint64_t device = 0, inode = 0, size = 0;
    int64_t modified_ns = 0;
    bool operator==(const Stamp&) const = default;
  };
  Stamp stamp(int fd) const;
  uint64_t hash_samples(uint64_t size,
                        const std::function<void(uint64_t offset, std::span<std::byte>)>& read,
                        const Visit& visit) const;
  uint64_t hash_now(int fd, const Visit& visit) const;
  void read_stored(uint64_t offset, std::span<std::byte> out) const;
  void check(int fd) const;
  [[noreturn]] void fail(int fd) const;
  template <typename Use>
  void with_descriptor(const Use& use) const;

  std::string path_;
  std::optional<FileDescriptor> file_;
  mutable std::mutex mutex_;  // guards stamp_.modified_ns
  mutable Stamp stamp_;       // at the last successful check
  uint64_t hash_ = 0;
  Compression compression_ = Compression::none;
  std::unique_ptr<Unpacked> unpacked_;  // nullptr: read as stored
};

/// All of a file's content, unpacked if it is compressed. Throws IoError, also if it exceeds
/// memory.
std::string read_content(const std::string& path);

}  // namespace tandem
