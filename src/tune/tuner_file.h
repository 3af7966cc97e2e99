// The tuner's file: a JSON object of entries by key, and what wrote it. Any number of processes, of
// any number of hosts that share a home, may read and write it at once: a change is merged into
// what is there under a lock, and replaces the file in one step. One that is damaged is repaired:
// whole entries are kept, and the file as it was is moved to FILE.damaged. A file of another
// release or of older entries is replaced.
#pragma once

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem {

/// `tuner.json` in the cache directory.
std::string tuner_file_path();

/// How long a process waits for one that holds the lock: changes take milliseconds.
inline constexpr std::chrono::milliseconds kTunerLockWait{500};

/// An entry has times ({"measured_us": {"candidate": 12.5}}), how they were measured ("spread",
/// "load", "time" in seconds since 1970), or the text of a choice ({"choice": "..."}).
bool is_tuner_entry(const nlohmann::json& entry);

/// All entries by key; none where there is no file, or one that another release wrote, whose times
/// say nothing about this one's kernels.
nlohmann::json read_tuner_file(const std::string& path);

/// Adds `entries` by key to what the file has by then; times are added to an entry's other ones.
/// Throws IoError where it cannot be written, or where another process keeps the lock.
void merge_into_tuner_file(const std::string& path, const nlohmann::json& entries,
                           std::chrono::milliseconds wait = kTunerLockWait);

/// The same, but a failure is a warning. After that this process writes `path` no more.
void keep_in_tuner_file(const std::string& path, const nlohmann::json& entries);

/// Entries of a damaged file's text that are whole, and only those of this release, which its first
/// lines say.
nlohmann::json salvaged_entries(std::string_view text);

}  // namespace tandem
