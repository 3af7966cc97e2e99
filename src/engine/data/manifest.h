// Manifest of data files: what each held when it was read, so that a later run need not read all of
// it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/data/data_file.h"

namespace tandem {

struct FileRecord {
  std::string path;  ///< absolute
  uint64_t bytes = 0;
  int64_t modified_ns = 0;
  std::optional<uint64_t> samples;  ///< hash of the sampled ranges (DataFile), if they were read
  std::optional<uint64_t> hash;     ///< XXH3-64 of all of it, if it was read
};

/// Record of an open file whose samples have been read.
FileRecord make_record(const DataFile& file);

/// Records of files that a run keeps at most.
inline constexpr size_t kMaxRecords = 10'000;
/// Records of the first ones of many files.
std::vector<FileRecord> make_records(std::span<const std::shared_ptr<DataFile>> files);
/// Manifest of the run in `out`.
inline std::string manifest_path(const std::string& out) {
  return out + "/data.json";
}

class Manifest {
 public:
  /// A manifest without records.
  Manifest() = default;
  explicit Manifest(const std::vector<FileRecord>& records);
  /// Throws IoError for a file that cannot be read or is none.
  static Manifest read(const std::string& path);
  std::string to_json() const;

  const std::map<std::string, FileRecord>& records() const { return records_; }
  /// Compares a file as it is now with its record. Returns the hash of all of it, if the record has
  /// one that still applies: size, modification time and samples are the same. Throws IoError if
  /// size or samples differ.
  std::optional<uint64_t> check(const FileRecord& now) const;
  /// Note on a file that was written to since its record was made, though its size and samples are
  /// the same; empty for any other.
  std::string describe_write(const FileRecord& now) const;
  /// Throws IoError if the record has another hash than `now`.
  void check_hash(const FileRecord& now) const;

 private:
  const FileRecord* find(const std::string& path) const;
  [[noreturn]] void refuse(const FileRecord& now, const std::string& what) const;

  std::string path_;
  std::map<std::string, FileRecord> records_;  ///< by path
};

/// "a.txt holds 30 bytes: expected 20; b.txt is new; ...": files that differ from their records,
/// are new or are gone, up to three; empty if there are none.
std::string describe_changes(const Manifest& before, std::span<const FileRecord> now);

}  // namespace tandem
