// Content of a data file that is compressed with gzip or Zstandard, unpacked once, as far as it is
// read, into a temporary file without a name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/system/file_descriptor.h"

namespace tandem {

enum class Compression : uint8_t { none, gzip, zstd };
/// Compression of a file that begins with `first`, its first 4 bytes or more.
Compression find_compression(std::string_view first);

/// Compressed file, read by `read(offset, out)`.
struct PackedFile {
  std::string path;
  Compression compression = Compression::none;
  uint64_t bytes = 0;
  std::function<void(uint64_t offset, std::span<std::byte> out)> read;
};

/// Reads a compressed file from its begin. Its checksums are verified.
class Unpacker {
 public:
  virtual ~Unpacker() = default;
  /// Next bytes of the content; fewer than `out` has only at the end. Throws IoError naming the
  /// file and the offset at which it is damaged or ends early.
  virtual size_t read(std::span<std::byte> out) = 0;
};
std::unique_ptr<Unpacker> open_unpacker(PackedFile file);

/// Thread-safe.
class Unpacked {
 public:
  /// Address by which another process of this host opens the content while this object exists.
  struct Handle {
    int64_t process = 0;
    int fd = -1;
    uint64_t bytes = 0;
  };
  /// Creates the temporary file, in TMPDIR or else /var/tmp or /tmp. Throws IoError.
  explicit Unpacked(PackedFile file);
  /// All of the content, which another process has unpacked. Throws IoError.
  Unpacked(const std::string& path, const Handle& handle);
  /// Unpacks up to `end`. Returns it, or the end of the content if that is less. Throws IoError for
  /// a damaged file, and if the content leaves too little room for other files.
  uint64_t reach(uint64_t end);
  /// `offset` and `out`: within what was reached.
  void read(uint64_t offset, std::span<std::byte> out) const;
  /// Unpacks all of it.
  Handle handle();
  /// Another descriptor of the content, all of which is unpacked, for reading.
  FileDescriptor duplicate();

 private:
  void check_room() const;

  std::string path_, folder_;
  FileDescriptor store_;
  std::mutex mutex_;                    // guards what follows
  std::optional<PackedFile> packed_;    // until reading begins: an unpacker takes memory
  std::unique_ptr<Unpacker> unpacker_;  // while some is left to unpack
  uint64_t bytes_ = 0;                  // unpacked so far
};

}  // namespace tandem
