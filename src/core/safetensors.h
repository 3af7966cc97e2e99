// safetensors files: an 8-byte little-endian header length, a JSON header (name -> dtype, shape,
// data_offsets; "__metadata__" -> strings), then the tensors' bytes, row-major, without holes.
//
// What is read may be any bytes at all: every length, shape and offset is checked against the file
// before it is used, and what does not fit is an IoError naming file and tensor. Tandem's own files
// also carry each tensor's XXH3-128 in the metadata under "xxh3:NAME"; files without are accepted.
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

#include "core/files.h"
#include "tandem/dtype.h"

namespace tandem {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  ///< bytes, from the start of the data
  int64_t elements() const;
};

/// A share of the work on a file, in whole tensors: those that begin in its part of the bytes.
struct Share {
  int index = 0, count = 1;
  bool has(uint64_t begin, uint64_t bytes) const {
    return bytes == 0 ? index == 0
                      : std::min(count - 1, int(begin * uint64_t(count) / bytes)) == index;
  }
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< by position in the file
  std::vector<size_t> by_name;            ///< their numbers, by name
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< byte of the file where the data starts
};

/// Throws IoError "FILE: tensor 'NAME': WHAT".
[[noreturn]] void reject_tensor(const std::string& file, const std::string& tensor,
                                std::string_view what);

constexpr uint64_t kMaxSafetensorsHeaderBytes = 100'000'000;
/// The length that a file's first 8 bytes give.
uint64_t safetensors_header_bytes(std::span<const std::byte> head);
/// `head`: the file's first bytes, at least up to the end of its header; `file_bytes`: its size.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> head, uint64_t file_bytes,
                                           const std::string& file);

/// An open file, read piece by piece: one that is cut meanwhile is an IoError, where a mapped one
/// would end the process.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// nullptr when there is none.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Throws IoError unless there is such a tensor with this shape.
  const SafetensorsEntry& require(std::string_view name, std::span<const int64_t> shape) const;
  std::vector<std::byte> data(const SafetensorsEntry& entry) const;
  /// Elements [begin, begin + out.size()) of an f32, bf16 or f16 tensor as f32.
  void read_f32(const SafetensorsEntry& entry, int64_t begin, std::span<float> out) const;
  /// Hash of the tensor's bytes, read anew.
  std::string hash(const SafetensorsEntry& entry) const;
  /// Throws IoError naming the first tensor, of those in `share`, whose bytes do not have the hash
  /// in the metadata. With `require_hashes`, also when a tensor has none.
  void verify(bool require_hashes = false, const Share& share = {}) const;
  /// Hash of the header, which covers names, shapes and every tensor's hash.
  const std::string& header_hash() const { return header_hash_; }
  /// Changes when any byte does: the header's hash where that covers every tensor, else that of the
  /// whole file.
  std::string identity() const;

 private:
  void read_tensor(const SafetensorsEntry& entry, uint64_t offset, std::span<std::byte> out) const;

  std::string path_;
  FileDescriptor file_;
  SafetensorsHeader header_;
  std::string header_hash_;
};

/// Writes one file: whole tensors front to back, or parts of them in any order, which several
/// writers may share. The tensors' hashes are added to the metadata; they have a fixed width, so
/// that every tensor's place is known before.
class SafetensorsWriter {
 public:
  struct Spec {
    std::string name;
    DType dtype = DType::f32;
    std::vector<int64_t> shape;
  };
  enum class Open : uint8_t {
    create,  ///< or empties it; then as long as it will be
    join     ///< the file that another writer has created for the same tensors
  };
  /// Throws IoError where the file cannot be opened, or made as long as it will be.
  SafetensorsWriter(std::string path, std::vector<Spec> specs,
                    std::map<std::string, std::string> metadata = {}, Open open = Open::create);
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;

  /// The next tensor's bytes, in the order of the specs. Throws InvalidArgument when the size is
  /// not the tensor's.
  void write(std::span<const std::byte> bytes);
  /// Bytes [begin, begin + bytes.size()) of a tensor; its hash is for `set_hash`.
  void write(size_t tensor, uint64_t begin, std::span<const std::byte> bytes);
  void set_hash(size_t tensor, const std::string& hash);
  /// Of what stands in the file, read anew.
  std::string hash_of(size_t tensor) const;
  /// fsyncs.
  void sync();
  /// Completes the header and fsyncs. Returns the header's hash. Throws InvalidArgument when
  /// tensors are missing.
  std::string finish();

  /// 32 characters where the header will be, by which a writer that joins knows the file.
  void mark(const std::string& text);
  bool is_marked(const std::string& text) const;
  /// Of a tensor's first byte in the file; of `specs.size()`: the file's end.
  uint64_t place_of(size_t tensor) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem
