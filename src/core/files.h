// Files that are read or written whole, and directories made durable. Every failure is an IoError
// naming the file and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/file_descriptor.h"

namespace tandem {

/// Throws IoError where the system cannot say, as in a folder that may not be searched.
bool path_exists(const std::string& path);
/// To its end, whatever size the system gives for it. Throws IoError also for more than memory has
/// room for, and for more than 256 MiB of what is no regular file.
std::string read_file(const std::string& path, Source source = Source::regular);
/// The same of a regular file of at most `max_bytes`, as all are that Tandem writes under this
/// name.
std::string read_small_file(const std::string& path, size_t max_bytes = size_t{1} << 20);
/// Creates or truncates, writes, and fsyncs. A symbolic link is refused.
void write_file(const std::string& path, std::string_view text);
/// The same under another name that then takes the place of `path`, whatever that was: a reader
/// finds the old content or the new one.
void replace_file(const std::string& path, std::string_view text);
/// Names in a directory, sorted; none when there is no such directory.
std::vector<std::string> names_in(const std::string& directory);
/// Throws IoError when a file of this name could not be written; leaves none.
void check_writable(const std::string& path);
/// fsyncs the open file `path`. Nothing on a file system that cannot (of FUSE and CIFS, for
/// directories): a run goes on there, less safe from a power cut.
void sync_file(int fd, const std::string& path);
/// fsyncs a directory, so that names created or renamed in it survive a power cut.
void sync_directory(const std::string& path);
/// As std::filesystem::create_directories; the folders in which it makes some are synced.
void make_directories(const std::string& path);

/// Bytes that this process has read from files and written to them: grows while work on a large
/// file gets on.
uint64_t file_bytes_moved();

/// Throws IoError "FILE: WHAT: the reason errno gives".
[[noreturn]] void throw_errno(const std::string& path, std::string_view what);

/// XXH3-128 of the bytes as 32 hexadecimal digits.
std::string content_hash(std::span<const std::byte> bytes);
std::string content_hash(std::string_view text);
/// Of a part of the open file `path`. Throws IoError when the file ends before.
std::string content_hash(int fd, const std::string& path, uint64_t begin, uint64_t bytes);

}  // namespace tandem
