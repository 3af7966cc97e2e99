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
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "core/env.h"
#include "core/file_descriptor.h"
#include "core/files.h"
#include "core/json.h"
#include "core/log.h"
#include "core/version.h"
#include "tandem/error.h"
#include "tune/op_desc.h"

namespace tandem {
namespace {

using Json = nlohmann::json;

// What wrote the file.
constexpr const char* kWrittenBy = "tandem";

// Held while the file is read, changed and replaced. A file system without locks, or a process that
// keeps one for long, must not stop the tuner: then two may write at once, and one's entries may be
// measured again.
class FileLock {
 public:
  explicit FileLock(const std::string& path) : file_(path + ".lock", O_RDWR | O_CREAT, 0644) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > until) return;
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

// A reader sees the old file or the new one, whole, also after a power cut.
void replace_file(const std::string& path, const std::string& text) {
  std::string temporary = path + ".XXXXXX";  // of no other process, on whatever host
  const int made = ::mkstemp(temporary.data());
  if (made < 0) throw_errno(temporary, "cannot be made");
  ::fchmod(made, 0644);
  ::close(made);
  try {
    write_file(temporary, text);
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(path, "cannot be replaced");
    sync_directory(folder_of(path));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

// The version first: what is left of a file that was cut off is still known to be this release's.
std::string text_of(const Json& entries) {
  nlohmann::ordered_json file;
  file[kWrittenBy] = kVersion;
  for (const auto& [key, entry] : entries.items()) file[key] = entry;
  return file.dump(1) + '\n';
}

void merge(Json& into, const Json& entries) {
  for (const auto& [key, entry] : entries.items()) {
    Json& kept = into[key];
    if (is_tuner_entry(kept) && kept.contains("measured_us") && entry.contains("measured_us")) {
      kept["measured_us"].update(entry["measured_us"]);
    } else {
      kept = entry;
    }
  }
}

struct Contents {
  Json entries = Json::object();
  bool damaged = false;
};

Contents contents_of(const std::string& path) {
  Contents contents;
  if (::access(path.c_str(), F_OK) != 0) return contents;
  const std::string text = read_file(path);
  Json file = parse_json(text);
  if (!file.is_object()) {
    contents.damaged = true;
    contents.entries = salvaged_entries(text);
    return contents;
  }
  if (file.value(kWrittenBy, Json()) != kVersion) {
    static std::once_flag once;
    std::call_once(once, [&] {
      log_message(LogLevel::info,
                  fmt::format("tuner cache {}: not of Tandem {}: measured anew", path, kVersion));
    });
    return contents;
  }
  for (auto& [key, entry] : file.items()) {
    if (key == kWrittenBy) continue;
    if (is_tuner_entry(entry)) {
      contents.entries[current_key(key)] = std::move(entry);
    } else {
      contents.damaged = true;
    }
  }
  return contents;
}

// Caller holds the lock.
Json repaired_entries(const std::string& path) {
  Contents contents = contents_of(path);
  if (!contents.damaged) return std::move(contents.entries);
  const std::string aside = path + ".damaged";
  const bool moved = ::rename(path.c_str(), aside.c_str()) == 0;
  if (moved) replace_file(path, text_of(contents.entries));
  log_message(LogLevel::warn,
              fmt::format("tuner cache {}: damaged: {} whole entr{} kept{}", path,
                          contents.entries.size(), contents.entries.size() == 1 ? "y" : "ies",
                          moved ? ", the file as it was is " + aside : ""));
  return std::move(contents.entries);
}

// Behind `at`, a JSON string; nothing where there is none.
std::optional<size_t> end_of_string(std::string_view text, size_t at) {
  if (at >= text.size() || text[at] != '"') return std::nullopt;
  for (size_t i = at + 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return std::nullopt;
}

size_t skip_space(std::string_view text, size_t at) {
  return std::min(text.find_first_not_of(" \t\r\n", at), text.size());
}

// Behind a JSON object that begins at `at`, as far as its braces say.
std::optional<size_t> end_of_object(std::string_view text, size_t at) {
  if (at >= text.size() || text[at] != '{') return std::nullopt;
  int depth = 0;
  for (size_t i = at; i < text.size();) {
    if (text[i] == '"') {
      const auto end = end_of_string(text, i);
      if (!end) return std::nullopt;
      i = *end;
      continue;
    }
    depth += text[i] == '{' ? 1 : text[i] == '}' ? -1 : 0;
    ++i;
    if (depth == 0) return i;
  }
  return std::nullopt;
}

struct Member {
  std::string key;
  Json value;
  size_t end;
};

// `"key": {...}` that begins at `at`.
std::optional<Member> member_at(std::string_view text, size_t at) {
  const auto key_end = end_of_string(text, at);
  if (!key_end) return std::nullopt;
  const size_t colon = skip_space(text, *key_end);
  if (colon >= text.size() || text[colon] != ':') return std::nullopt;
  const size_t begin = skip_space(text, colon + 1);
  const auto end = end_of_object(text, begin);
  if (!end) return std::nullopt;
  const Json key = parse_json(text.substr(at, *key_end - at));
  Json value = parse_json(text.substr(begin, *end - begin));
  if (!key.is_string() || !is_tuner_entry(value)) return std::nullopt;
  return Member{key.get<std::string>(), std::move(value), *end};
}

}  // namespace

std::string tuner_file_path() {
  return env().cache_dir + "/tuner.json";
}

bool is_tuner_entry(const Json& entry) {
  if (!entry.is_object()) return false;
  if (const auto choice = entry.find("choice"); choice != entry.end()) return choice->is_string();
  const auto times = entry.find("measured_us");
  return times != entry.end() && times->is_object() &&
         std::all_of(times->begin(), times->end(), [](const Json& us) { return us.is_number(); });
}

Json salvaged_entries(std::string_view text) {
  Json entries = Json::object();
  const std::string ours = fmt::format("\"{}\": \"{}\"", kWrittenBy, kVersion);
  if (text.find(ours) == text.npos) return entries;
  for (size_t at = text.find('"'); at != text.npos;) {
    std::optional<Member> member = member_at(text, at);
    if (member) entries[member->key] = std::move(member->value);
    at = text.find('"', member ? member->end : at + 1);
  }
  return entries;
}

Json read_tuner_file(const std::string& path) {
  Contents contents;
  try {
    contents = contents_of(path);
    if (!contents.damaged) return std::move(contents.entries);
    const FileLock lock(path);
    return repaired_entries(path);
  } catch (const IoError& error) {
    log_message(LogLevel::warn,
                fmt::format("tuner cache {}{}: {}", path,
                            contents.damaged ? ": damaged, not repaired" : "", error.what()));
    return std::move(contents.entries);
  }
}

void merge_into_tuner_file(const std::string& path, const Json& entries) {
  make_directories(folder_of(path));
  const FileLock lock(path);
  Json all = repaired_entries(path);
  merge(all, entries);
  replace_file(path, text_of(all));
}

}  // namespace tandem
