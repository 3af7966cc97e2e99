#include "engine/data/select_data.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <utility>

#include "engine/config/data_format.h"
#include "engine/data/corpus.h"
#include "engine/data/data_kind.h"
#include "engine/data/tokens/token_files.h"
#include "tandem/error.h"

namespace tandem {
namespace {

struct Inspected {
  std::string path;
  DataFacts facts;
  bool in_folder;
};
using Files = std::vector<Inspected>;

std::string count_files(size_t count, std::string_view of) {
  return fmt::format("{} file{} of {}", count, count == 1 ? "" : "s", of);
}

/// "DIR/a.png (a PNG image), ..."
std::string name_first(const Files& files) {
  const DataFacts& facts = files[0].facts;
  return files[0].path + (facts.what.empty() ? "" : fmt::format(" ({})", facts.what)) +
         (files.size() > 1 ? ", ..." : "");
}

constexpr std::pair<DataKind, const char*> kFormats[] = {{DataKind::text, "text"},
                                                         {DataKind::json_lines, "jsonl"},
                                                         {DataKind::chats, "chat"},
                                                         {DataKind::tokens, "tokens"}};

const char* words_of(const std::string& format) {
  return find_data_format(format)->words;
}

/// Files of an entry, by their kind.
class Selection {
 public:
  Selection(const std::vector<std::string>& paths, const std::string& text_key)
      : paths_(paths), found_(find_files(paths)) {
    for (const std::string& file : found_.files) {
      const bool in_folder = std::ranges::binary_search(found_.in_folders, file);
      const DataFacts facts = inspect_data(file, text_key);
      ++packed_[facts.compression];
      kinds_[facts.kind].push_back({file, facts, in_folder});
    }
  }

  SelectedData select(const std::string& format) {
    result_.format = format == "auto" ? choose_format() : format;
    for (auto& [kind, files] : kinds_) {
      Files left_out;
      for (const Inspected& file : files) {
        takes(file, format == "auto") ? result_.files.push_back(file.path)
                                      : left_out.push_back(file);
      }
      if (!left_out.empty()) note_left_out(kind, left_out);
    }
    if (result_.files.empty()) fail_without_files();
    std::ranges::sort(result_.files);
    if (result_.format == "tokens") result_.files = find_token_files(result_.files);
    for (std::string& note : describe_left_out(found_)) result_.notes.push_back(std::move(note));
    note_compressed();
    return std::move(result_);
  }

 private:
  Files& of(DataKind kind) { return kinds_[kind]; }

  /// Throws unless all data have one format.
  std::string choose_format() {
    std::vector<std::string> found;
    std::string format;
    for (const auto& [kind, name] : kFormats) {
      if (of(kind).empty()) continue;
      found.push_back(count_files(of(kind).size(), words_of(name)) +
                      fmt::format(" ({})", name_first(of(kind))));
      format = name;
    }
    if (found.size() > 1) {
      throw ConfigError(fmt::format(
          "{}: holds {}: expected one format: set data.format to take one, or name files of one by "
          "a pattern",
          fmt::join(paths_, ", "), fmt::join(found, " and ")));
    }
    refuse(of(DataKind::unreadable));
    Files named = of(DataKind::binary);
    for (const Inspected& file : of(DataKind::companion)) {
      if (!file.facts.what.empty() && found.empty() && of(DataKind::companion).size() == 1) {
        named.push_back(file);  // a single file of JSON
      }
    }
    std::erase_if(named, [](const Inspected& file) { return file.in_folder; });
    refuse(named);
    return format.empty() ? "text" : format;
  }

  void refuse(const Files& files) const {
    if (files.empty()) return;
    const DataFacts& facts = files[0].facts;
    const std::string others =
        files.size() > 1 ? fmt::format(" (as {} other files)", files.size() - 1) : "";
    throw ConfigError(fmt::format("{}: {}{}: expected text, JSON Lines or token files{}{}",
                                  files[0].path, facts.what, others,
                                  facts.advice.empty() ? "" : ": ", facts.advice));
  }

  bool takes(const Inspected& file, bool is_auto) const {
    const DataKind kind = file.facts.kind;
    if (kind == DataKind::empty) return false;
    if (!is_auto && !file.in_folder) return true;
    if (result_.format == "tokens") return kind == DataKind::tokens;
    const bool has_lines = kind == DataKind::json_lines || kind == DataKind::chats;
    if (result_.format == "chat") return kind == DataKind::chats || (!is_auto && has_lines);
    if (result_.format == "jsonl") return kind == DataKind::json_lines || (!is_auto && has_lines);
    return kind == DataKind::text || kind == DataKind::companion || (!is_auto && has_lines);
  }

  void note_left_out(DataKind kind, const Files& files) {
    const std::string what = kind == DataKind::empty
                                 ? "empty"
                                 : fmt::format("that {} no {}", files.size() == 1 ? "is" : "are",
                                               words_of(result_.format));
    result_.notes.push_back(kind == DataKind::empty
                                ? fmt::format("left out {} empty file{} ({})", files.size(),
                                              files.size() == 1 ? "" : "s", name_first(files))
                                : fmt::format("left out {} file{} {} ({})", files.size(),
                                              files.size() == 1 ? "" : "s", what,
                                              name_first(files)));
  }

  [[noreturn]] void fail_without_files() const {
    std::vector<std::string> notes = result_.notes;
    for (std::string& note : describe_left_out(found_)) notes.push_back(std::move(note));
    throw ConfigError(fmt::format(
        "{}: {} files, none of {}{}{}: expected some", fmt::join(paths_, ", "), found_.files.size(),
        words_of(result_.format), notes.empty() ? "" : "; ", fmt::join(notes, "; ")));
  }

  void note_compressed() {
    const size_t gzip = packed_[Compression::gzip], zstd = packed_[Compression::zstd];
    if (gzip + zstd == 0) return;
    result_.notes.push_back(
        fmt::format("unpacks {} gzip and {} zstd files into temporary files (TMPDIR)", gzip, zstd));
  }

  const std::vector<std::string>& paths_;
  FoundFiles found_;
  std::map<DataKind, Files> kinds_;
  std::map<Compression, size_t> packed_;
  SelectedData result_;
};

}  // namespace

SelectedData select_data(std::vector<std::string> paths, const std::string& format,
                         const std::string& text_key) {
  for (std::string& path : paths) {
    if (is_token_prefix(path)) path += ".bin";
  }
  return Selection(paths, text_key).select(format);
}

}  // namespace tandem
