// Whole-file reads and writes, and durable directories. Every failure is an IoError with the file
// and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/system/file_descriptor.h"

namespace tandem {

/// Throws IoError if the system cannot tell, as in a folder without search permission.
bool path_exists(const std::string& path);
/// Reads to end of file, whatever size the system reports. Throws IoError also if the content
/// exceeds memory, or 256 MiB if the file is not a regular one.
std::string read_file(const std::string& path, Source source = Source::regular);
/// Reads a regular file of at most `max_bytes`, enough for every file Tandem writes under this
/// name.
std::string read_small_file(const std::string& path, size_t max_bytes = size_t{1} << 20);
/// Text after the byte order mark with which some editors begin a file.
std::string_view without_bom(std::string_view text);
/// Creates or truncates, writes, and fsyncs. Throws for a symbolic link.
void write_file(const std::string& path, std::string_view text);
/// Writes under another name, then renames it to `path`, whatever that was: a reader finds the old
/// content or the new. Concurrent writers use different names.
void replace_file(const std::string& path, std::string_view text);
/// Names in a directory, sorted; empty if the directory does not exist.
std::vector<std::string> names_in(const std::string& directory);
/// Throws IoError if a file of this name could not be written; does not keep it.
void check_writable(const std::string& path);
/// fsyncs the open file `path`. No-op on a file system that does not support it (FUSE and CIFS, for
/// directories): a run continues there with less protection from power loss.
void sync_file(int fd, const std::string& path);
/// fsyncs a directory, so that names created or renamed in it survive power loss.
void sync_directory(const std::string& path);
/// Same as std::filesystem::create_directories, and fsyncs the parents of new folders.
void make_directories(const std::string& path);
/// Throws IoError if `path` is a symbolic link, through which other files would be written.
void reject_link(const std::string& path);
/// Whether the open file is the one of this name.
bool is_named(int fd, const std::string& path);
/// Bytes that this process may still write to the file system of `path`; nullopt if it cannot tell.
std::optional<uint64_t> free_bytes(const std::string& path);

/// Bytes that this process has read from and written to files: a progress indicator for large
/// files.
uint64_t file_bytes_moved();

/// Throws IoError "FILE: WHAT: reason given by errno".
[[noreturn]] void throw_errno(const std::string& path, std::string_view what);

/// XXH3-128 of the bytes as 32 hexadecimal digits.
std::string content_hash(std::span<const std::byte> bytes);
std::string content_hash(std::string_view text);
/// Hash of a range of the open file `path`. Throws IoError if the file ends before.
std::string content_hash(int fd, const std::string& path, uint64_t begin, uint64_t bytes);

}  // namespace tandem
