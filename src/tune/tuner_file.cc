#include "tune/tuner_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "core/system/env.h"
#include "core/system/file_descriptor.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "core/version.h"
#include "tandem/error.h"
#include "tune/op_desc.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

constexpr const char* kWrittenBy = "tandem";
/// Release and format of its entries: those of format 1 were not separated by machine and build.
const std::string kWriter = fmt::format("{}, form 2", kVersion);
/// Max size of a valid file, some ten thousand entries. Larger files were not written by the tuner.
constexpr size_t kMaxBytes = size_t(4) << 20;

// Lock held while the file is read, changed and replaced. On a file system without locks two
// processes may write at once, and one's entries may be measured again.
class FileLock {
 public:
  /// Throws IoError if another process holds the lock for longer than `wait`.
  FileLock(const std::string& path, std::chrono::milliseconds wait)
      : file_(path + ".lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK) {
    const auto until = std::chrono::steady_clock::now() + wait;
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return;
      if (std::chrono::steady_clock::now() > until) {
        throw IoError(fmt::format("{}.lock: another process has held it for {:g} s", path,
                                  std::chrono::duration<double>(wait).count()));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

 private:
  FileDescriptor file_;  // closing it unlocks
};

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

// Replaces the file atomically: a reader sees the complete old or new file, even after a power cut.
void replace_file(const std::string& path, const std::string& text) {
  std::random_device random;  // unique among processes, on any host
  const std::string temporary = fmt::format("{}.{:08x}{:08x}", path, random(), random());
  try {
    write_file(temporary, text);
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(path, "cannot be replaced");
    sync_directory(folder_of(path));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

// Writes the version first, so that a truncated file is still recognized as this release's.
std::string text_of(const Json& entries) {
  nlohmann::ordered_json file;
  file[kWrittenBy] = kWriter;
  for (const auto& [key, entry] : entries.items()) file[key] = entry;
  return dump_json(file, 1) + '\n';
}

void merge(Json& into, const Json& entries) {
  for (const auto& [key, entry] : entries.items()) {
    Json& known = into[key];
    if (is_tuner_entry(known) && known.contains("measured_us") && entry.contains("measured_us")) {
      known.merge_patch(entry);
    } else {
      known = entry;
    }
  }
}

/// Erases the older half. Choices have no time: they determine bits, and are erased last.
void drop_oldest(Json& entries) {
  std::vector<std::pair<double, std::string>> by_time;
  for (const auto& [key, entry] : entries.items()) {
    by_time.emplace_back(entry.value("time", std::numeric_limits<double>::max()), key);
  }
  std::sort(by_time.begin(), by_time.end());
  for (size_t i = 0; i < (by_time.size() + 1) / 2; ++i) entries.erase(by_time[i].second);
}

/// Text within the size that can be read again; erases entries if needed.
std::string fitting_text(Json& entries) {
  std::string text = text_of(entries);
  while (text.size() > kMaxBytes) {
    drop_oldest(entries);
    text = text_of(entries);
  }
  return text;
}

struct Contents {
  Json entries = Json::object();
  std::string damage;  // empty: none
};

Contents contents_of(const std::string& path) {
  Contents contents;
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return contents;
  if (S_ISREG(status.st_mode) && size_t(status.st_size) > kMaxBytes) {
    contents.damage = fmt::format("{} bytes, more than {} MiB", status.st_size, kMaxBytes >> 20);
    return contents;
  }
  const std::string text = read_file(path);
  Json file = parse_json(text);
  if (!file.is_object()) {
    contents.damage = "damaged";
    contents.entries = salvaged_entries(text);
    return contents;
  }
  if (file.value(kWrittenBy, Json()) != kWriter) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log_message(LogLevel::info,
                  fmt::format("tuner cache {}: not of Tandem {}: measured anew", path, kWriter));
    });
    return contents;
  }
  for (auto& [key, entry] : file.items()) {
    if (key == kWrittenBy) continue;
    if (is_tuner_entry(entry)) {
      auto [now, renamed] = current_entry(key, std::move(entry));
      contents.entries[now] = std::move(renamed);
    } else {
      contents.damage = "damaged";
    }
  }
  return contents;
}

// Caller holds the lock.
Json repaired_entries(const std::string& path) {
  Contents contents = contents_of(path);
  if (contents.damage.empty()) return std::move(contents.entries);
  const std::string aside = path + ".damaged";
  const bool moved = ::rename(path.c_str(), aside.c_str()) == 0;
  if (moved) replace_file(path, text_of(contents.entries));
  log_message(LogLevel::warn,
              fmt::format("tuner cache {}: {}: {} whole entr{} kept{}", path, contents.damage,
                          contents.entries.size(), contents.entries.size() == 1 ? "y" : "ies",
                          moved ? ", the file as it was is " + aside : ""));
  return std::move(contents.entries);
}

/// Files that this process could not write or lock, and does not try again.
class GivenUp {
 public:
  bool has(const std::string& path) {
    const std::lock_guard lock(mutex_);
    return paths_.contains(path);
  }
  /// True if it was not yet in the set.
  bool add(const std::string& path) {
    const std::lock_guard lock(mutex_);
    return paths_.insert(path).second;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> paths_;
};
GivenUp& given_up() {
  static GivenUp paths;
  return paths;
}

}  // namespace

std::string tuner_file_path() {
  return env().cache_dir + "/tuner.json";
}

bool is_tuner_entry(const Json& entry) {
  if (!entry.is_object()) return false;
  if (const auto choice = entry.find("choice"); choice != entry.end()) return choice->is_string();
  for (const char* name : {"spread", "load", "time"}) {
    if (const auto number = entry.find(name); number != entry.end() && !number->is_number()) {
      return false;
    }
  }
  const auto times = entry.find("measured_us");
  return times != entry.end() && times->is_object() &&
         std::all_of(times->begin(), times->end(), [](const Json& us) { return us.is_number(); });
}

Json salvaged_entries(std::string_view text) {
  Json entries = Json::object();
  const std::string ours = fmt::format("\"{}\": \"{}\"", kWrittenBy, kWriter);
  if (text.find(ours) == text.npos) return entries;
  // Matches the format of text_of: a line that begins with one space and a quote begins an entry,
  // and one of a space and a brace ends it. Strings have no line feeds, so each line is read once.
  const std::string_view begins = "\n \"", ends = "\n }";
  for (size_t at = text.find(begins); at != text.npos;) {
    const size_t next = text.find(begins, at + 1);
    const std::string_view member = text.substr(at, next == text.npos ? next : next - at);
    at = next;
    const size_t end = member.find(ends);
    if (end == member.npos) continue;
    const Json object = parse_json(fmt::format("{{{}}}", member.substr(0, end + ends.size())));
    if (!object.is_object() || object.size() != 1) continue;
    if (is_tuner_entry(*object.begin())) entries.update(object);
  }
  return entries;
}

Json read_tuner_file(const std::string& path) {
  Contents contents;
  try {
    contents = contents_of(path);
    if (contents.damage.empty() || given_up().has(path)) return std::move(contents.entries);
    const FileLock lock(path, kTunerLockWait);
    return repaired_entries(path);
  } catch (const IoError& error) {
    if (given_up().add(path)) {
      log_message(
          LogLevel::warn,
          fmt::format("tuner cache {}{}: {}", path,
                      contents.damage.empty() ? "" : ": damaged, not repaired", error.what()));
    }
    return std::move(contents.entries);
  }
}

void merge_into_tuner_file(const std::string& path, const Json& entries,
                           std::chrono::milliseconds wait) {
  make_directories(folder_of(path));
  const FileLock lock(path, wait);
  Json all = repaired_entries(path);
  merge(all, entries);
  replace_file(path, fitting_text(all));
}

void keep_in_tuner_file(const std::string& path, const Json& entries) {
  if (given_up().has(path)) return;
  try {
    merge_into_tuner_file(path, entries);
  } catch (const IoError& error) {
    if (!given_up().add(path)) return;
    log_message(
        LogLevel::warn,
        fmt::format("tuner cache: {}: what this run measures is not kept (TANDEM_CACHE_DIR)",
                    error.what()));
  }
}

}  // namespace tandem
