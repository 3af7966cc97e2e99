// Tuner's file: a JSON object of entries by key, and the version that wrote it. Any number of
// processes, on any number of hosts that share a home, may read and write it concurrently: a change
// is merged into the contents under a lock, and replaces the file atomically. A damaged file is
// repaired: complete entries are retained, and the original is moved to FILE.damaged. A file of
// another release or of older entries is replaced.
#pragma once

#include <chrono>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace tandem {

/// Path of `tuner.json` in the cache directory.
std::string tuner_file_path();

/// Max wait for a process that holds the lock: changes take milliseconds.
inline constexpr std::chrono::milliseconds kTunerLockWait{500};

/// Whether an entry is valid. It has times ({"measured_us": {"candidate": 12.5}}), measuring
/// conditions ("spread", "load", "time" in seconds since 1970), or the text of a choice ({"choice":
/// "..."}).
bool is_tuner_entry(const nlohmann::json& entry);

/// All entries by key; none if there is no file, or one of another release, whose times do not
/// apply to this one's kernels.
nlohmann::json read_tuner_file(const std::string& path);

/// Adds `entries` by key to the file's contents; times are added to an entry's existing ones.
/// Throws IoError if the file cannot be written, or another process holds the lock.
void merge_into_tuner_file(const std::string& path, const nlohmann::json& entries,
                           std::chrono::milliseconds wait = kTunerLockWait);

/// Same, but a failure is a warning, after which this process no longer writes `path`.
void keep_in_tuner_file(const std::string& path, const nlohmann::json& entries);

/// Complete entries in a damaged file's text, only if its first lines name this release.
nlohmann::json salvaged_entries(std::string_view text);

}  // namespace tandem
