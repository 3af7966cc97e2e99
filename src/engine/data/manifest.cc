#include "engine/data/manifest.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kManifestVersion = 1;
constexpr size_t kMaxManifest = size_t(1) << 28;

uint64_t parse_hash(const std::string& text) {
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    throw InvalidArgument(
        fmt::format("the hash '{}': expected 16 hexadecimal digits", printable(text)));
  }
  return hash;
}

FileRecord parse_record(const Json& entry) {
  FileRecord record;
  record.path = entry.at("path").get<std::string>();
  record.bytes = entry.at("bytes").get<uint64_t>();
  record.modified_ns = entry.at("modified_ns").get<int64_t>();
  for (const auto& [name, hash] : {std::pair{"samples", &record.samples}, {"hash", &record.hash}}) {
    if (entry.contains(name)) *hash = parse_hash(entry[name].get<std::string>());
  }
  return record;
}

/// Whether both were read, and are not the same.
bool differ(std::optional<uint64_t> a, std::optional<uint64_t> b) {
  return a && b && a != b;
}

}  // namespace

FileRecord make_record(const DataFile& file) {
  const std::string path = std::filesystem::absolute(file.path()).lexically_normal().string();
  return {path, file.stored_bytes(), file.modified_ns(), file.hash(), {}};
}

std::vector<FileRecord> make_records(std::span<const std::shared_ptr<DataFile>> files) {
  std::vector<FileRecord> records;
  for (const auto& file : files.first(std::min(files.size(), kMaxRecords))) {
    records.push_back(make_record(*file));
  }
  return records;
}

std::string describe_changes(const Manifest& before, std::span<const FileRecord> now) {
  constexpr size_t kShown = 3;
  std::map<std::string, const FileRecord*> gone;
  for (const auto& [path, record] : before.records()) gone[path] = &record;
  std::vector<std::string> changes;
  for (const FileRecord& record : now) {
    const auto found = gone.find(record.path);
    if (found == gone.end()) {
      changes.push_back(record.path + " is new");
      continue;
    }
    const FileRecord& old = *found->second;
    if (record.bytes != old.bytes) {
      changes.push_back(
          fmt::format("{} holds {} bytes: expected {}", record.path, record.bytes, old.bytes));
    } else if (differ(record.samples, old.samples)) {
      changes.push_back(record.path + " holds other bytes");
    }
    gone.erase(found);
  }
  for (const auto& [path, record] : gone) changes.push_back(path + " is gone");
  const size_t shown = std::min(changes.size(), kShown);
  std::string text = fmt::format("{}", fmt::join(std::span(changes).first(shown), "; "));
  if (changes.size() > shown) text += fmt::format("; and {} more", changes.size() - shown);
  return text;
}

Manifest::Manifest(const std::vector<FileRecord>& records) {
  for (const FileRecord& record : records) records_[record.path] = record;
}

Manifest Manifest::read(const std::string& path) {
  Manifest manifest;
  manifest.path_ = path;
  try {
    const Json root = Json::parse(read_small_file(path, kMaxManifest));
    const int version = root.at("version").get<int>();
    if (version != kManifestVersion) {
      throw InvalidArgument(fmt::format("version {}: expected {}", version, kManifestVersion));
    }
    for (const Json& entry : root.at("files")) {
      FileRecord record = parse_record(entry);
      manifest.records_[record.path] = record;
    }
  } catch (const nlohmann::json::exception& failed) {
    throw IoError(fmt::format("{}: no manifest of data: {}", path, printable(failed.what(), 200)));
  } catch (const InvalidArgument& failed) {
    throw IoError(fmt::format("{}: no manifest of data: {}", path, failed.what()));
  }
  return manifest;
}

std::string Manifest::to_json() const {
  Json files = Json::array();
  for (const auto& [path, record] : records_) {
    Json entry{{"path", path}, {"bytes", record.bytes}, {"modified_ns", record.modified_ns}};
    if (record.samples) entry["samples"] = fmt::format("{:016x}", *record.samples);
    if (record.hash) entry["hash"] = fmt::format("{:016x}", *record.hash);
    files.push_back(std::move(entry));
  }
  const Json root{{"version", kManifestVersion}, {"files", std::move(files)}};
  return dump_json(root, 1) + "\n";
}

const FileRecord* Manifest::find(const std::string& path) const {
  const auto found = records_.find(path);
  return found == records_.end() ? nullptr : &found->second;
}

void Manifest::refuse(const FileRecord& now, const std::string& what) const {
  throw IoError(
      fmt::format("{}: {}, as {} says (`tandem data index` makes it anew)", now.path, what, path_));
}

std::optional<uint64_t> Manifest::check(const FileRecord& now) const {
  const FileRecord* record = find(now.path);
  if (!record) return {};
  if (record->bytes != now.bytes) {
    refuse(now, fmt::format("holds {} bytes: expected {}", now.bytes, record->bytes));
  }
  if (differ(record->samples, now.samples)) refuse(now, "holds other bytes: expected those it had");
  return record->modified_ns == now.modified_ns ? record->hash : std::nullopt;
}

std::string Manifest::describe_write(const FileRecord& now) const {
  const FileRecord* record = find(now.path);
  const bool is_written = record && record->modified_ns != now.modified_ns;
  if (!is_written || record->bytes != now.bytes) return "";
  return fmt::format("{} was written to after {} was made; its {} the same", now.path, path_,
                     record->samples && now.samples ? "samples are" : "size is");
}

void Manifest::check_hash(const FileRecord& now) const {
  const FileRecord* record = find(now.path);
  if (record && record->hash && record->hash != now.hash) {
    refuse(now, "holds other bytes: expected those it had");
  }
}

}  // namespace tandem
