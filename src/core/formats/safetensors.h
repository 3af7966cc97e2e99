// safetensors files: an 8-byte little-endian header length, a JSON header (name -> dtype, shape,
// data_offsets; "__metadata__" -> strings), then the tensors' bytes, row-major, without gaps.
//
// Input may be arbitrary bytes: every length, shape and offset is checked against the file before
// use, and a violation is an IoError with file and tensor. Tandem's own files also store each
// tensor's XXH3-128 in the metadata under "xxh3:NAME"; files without are accepted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/system/files.h"
#include "tandem/dtype.h"
#include "tandem/tensor.h"

namespace tandem {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< bytes, from the start of the data
  int64_t elements() const;
};

/// Share of the work on a file, in whole tensors: those that begin in the share's byte range.
struct Share {
  int index = 0, count = 1;
  bool has(uint64_t begin, uint64_t bytes) const {
    return bytes == 0 ? index == 0
                      : std::min(count - 1, int(begin * uint64_t(count) / bytes)) == index;
  }
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in file order
  std::vector<size_t> by_name;            ///< indices into `entries`, sorted by name
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< file offset of the data
};

/// Throws IoError "FILE: tensor 'NAME': WHAT".
[[noreturn]] void reject_tensor(const std::string& file, const std::string& tensor,
                                std::string_view what);

constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
/// Header length given by the first 8 bytes of a file.
uint64_t safetensors_header_bytes(std::span<const std::byte> head);
/// `head`: first bytes of the file, at least up to the end of its header; `file_bytes`: its size.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes,
                                           const std::string& file);

/// Open file, read in chunks: truncation by another process is an IoError, whereas a mapped file
/// would crash the process.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Entry of this name, or nullptr.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Throws IoError unless there is a tensor of this name and shape.
  const SafetensorsEntry& require(std::string_view name, std::span<const int64_t> shape) const;
  std::vector<std::byte> data(const SafetensorsEntry& entry) const;
  /// Elements [begin, begin + out.elements()) of a tensor of out's dtype. `out`: contiguous, on the
  /// host.
  void read(const SafetensorsEntry& entry, int64_t begin, const Tensor& out) const;
  /// Elements [begin, begin + out.size()) of an f32, bf16 or f16 tensor as f32.
  void read_f32(const SafetensorsEntry& entry, int64_t begin, std::span<float> out) const;
  /// Elements of an e4m3 tensor, as read_f32: codes, which the caller multiplies by their scales.
  void read_codes(const SafetensorsEntry& entry, int64_t begin, std::span<float> out) const;
  /// Hash of the tensor's bytes, read again from the file.
  std::string hash(const SafetensorsEntry& entry) const;
  /// Throws IoError with the first tensor of `share` whose bytes do not match the hash in the
  /// metadata. With `require_hashes`, also if a tensor has none. On this thread's kernel threads.
  void verify(bool require_hashes = false, const Share& share = {}) const;
  /// Hash of the header, which covers names, shapes and every tensor's hash.
  const std::string& header_hash() const { return header_hash_; }
  /// Changes if any byte does: the header's hash if that covers every tensor, else the hash of the
  /// whole file.
  std::string identity() const;

 private:
  void read_tensor(const SafetensorsEntry& entry, uint64_t offset, std::span<std::byte> out) const;
  void check_range(const SafetensorsEntry& entry, int64_t begin, size_t count) const;
  void verify(const SafetensorsEntry& entry, bool require_hashes) const;

  std::string path_;
  FileDescriptor file_;
  SafetensorsHeader header_;
  std::string header_hash_;
};

/// Writes one file: whole tensors in order, or parts of them in any order by one or several
/// writers. Tensor hashes are added to the metadata; their width is fixed, so that every tensor's
/// offset is known in advance.
class SafetensorsWriter {
 public:
  struct Spec {
    std::string name;
    DType dtype = DType::f32;
    std::vector<int64_t> shape;
  };
  enum class Open : uint8_t {
    create,  ///< creates or truncates, then sets the final size
    join     ///< opens the file that another writer created for the same tensors
  };
  /// Throws IoError if the file cannot be opened or set to its final size.
  SafetensorsWriter(std::string path, std::vector<Spec> specs,
                    std::map<std::string, std::string> metadata = {}, Open open = Open::create);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;

  /// Writes the next tensor's bytes, in the order of the specs. Throws InvalidArgument if the size
  /// is not the tensor's.
  void write(std::span<const std::byte> bytes);
  /// Writes bytes [begin, begin + bytes.size()) of a tensor, which the system begins to write to
  /// disk; the caller passes its hash to `set_hash`.
  void write(size_t tensor, uint64_t begin, std::span<const std::byte> bytes);
  void set_hash(size_t tensor, const std::string& hash);
  /// Hash of the tensor's bytes in the file, read again.
  std::string tensor_hash(size_t tensor) const;
  void sync();
  /// Completes the header and, unless the caller is to call `sync`, fsyncs. Returns the header's
  /// hash. Throws InvalidArgument if tensors are missing.
  std::string finish(bool syncs = true);

  /// Writes 32 characters at the position of the header, by which a joining writer recognizes the
  /// file.
  void mark(const std::string& text);
  bool is_marked(const std::string& text) const;
  /// File offset of a tensor's first byte; for `specs.size()`: the end of the file.
  uint64_t tensor_offset(size_t tensor) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
