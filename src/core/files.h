// Files that are read whole or mapped, and directories made durable. Every failure is an IoError
// naming the file and the system's reason.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// A read-only mapping of a whole file; an empty file maps to an empty span. Moves, never copies.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// Throws IoError where the system cannot say, as in a folder that may not be searched.
bool path_exists(const std::string& path);
std::string read_file(const std::string& path);
/// Creates or truncates, writes, and fsyncs.
void write_file(const std::string& path, std::string_view text);
/// Throws IoError when a file of this name could not be written; leaves none.
void check_writable(const std::string& path);
/// fsyncs a directory, so that names created or renamed in it survive a power cut.
void sync_directory(const std::string& path);
/// As std::filesystem::create_directories.
void make_directories(const std::string& path);

/// Throws IoError "FILE: WHAT: the reason errno gives".
[[noreturn]] void throw_errno(const std::string& path, std::string_view what);

/// XXH3-128 of the bytes as 32 hexadecimal digits.
std::string content_hash(std::span<const std::byte> bytes);
std::string content_hash(std::string_view text);

}  // namespace tandem
