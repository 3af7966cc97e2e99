#include "engine/data/corpus.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <numeric>
#include <optional>
#include <utility>

#include "core/system/files.h"
#include "engine/data/data_file.h"
#include "engine/data/text/text_hashing.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr size_t kCopyBelow = 256 * 1024;

std::string first_and_count(const std::vector<std::string>& paths) {
  return paths[0] + (paths.size() > 1 ? ", ..." : "");
}

std::string describe_files(std::span<const int64_t> sizes, std::span<const uint64_t> hashes) {
  return fmt::format("{} files, {} bytes, hash {}", sizes.size(),
                     std::accumulate(sizes.begin(), sizes.end(), int64_t(0)),
                     content_hash(std::as_bytes(hashes)));
}

void add_folder(const fs::path& folder, FoundFiles& found) {
  std::error_code code;
  fs::recursive_directory_iterator at(folder, code), end;
  while (!code && at != end) {
    const fs::file_type type = at->symlink_status(code).type();
    if (code) break;
    if (at->path().filename().string().starts_with('.')) {
      found.hidden.push_back(at->path().string());
      at.disable_recursion_pending();
    } else if (type == fs::file_type::directory && path_exists(at->path().string() + kRunId)) {
      found.runs.push_back(at->path().string());
      at.disable_recursion_pending();
    } else if (type == fs::file_type::regular) {
      found.in_folders.push_back(at->path().lexically_normal().string());
      found.files.push_back(at->path().string());
    } else if (type != fs::file_type::directory) {
      found.skipped.push_back(at->path().string());
    }
    at.increment(code);
  }
  if (code) throw IoError(fmt::format("{}: cannot list: {}", folder.string(), code.message()));
}

void add_path(const std::string& path, FoundFiles& found) {
  std::error_code code, ignored;
  const fs::file_type type = fs::status(path, code).type();
  if (type == fs::file_type::directory) return add_folder(path, found);
  if (type == fs::file_type::regular) return found.files.push_back(path);
  if (type != fs::file_type::not_found && code) {
    throw IoError(fmt::format("{}: cannot look at it: {}", path, code.message()));
  }
  if (type != fs::file_type::not_found) {
    throw IoError(fmt::format("{}: expected a file or folder, found a {}", path,
                              type == fs::file_type::fifo     ? "pipe"
                              : type == fs::file_type::socket ? "socket"
                                                              : "device"));
  }
  throw IoError(
      fmt::format("{}: {}", path,
                  fs::is_symlink(path, ignored) ? "a link to nothing" : "no such file or folder"));
}

void add_glob(const std::string& pattern, FoundFiles& found) {
  glob_t matched{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &matched);
  const std::vector<std::string> matches(matched.gl_pathv, matched.gl_pathv + matched.gl_pathc);
  ::globfree(&matched);
  if (status == GLOB_NOMATCH)
    throw IoError(fmt::format("{}: the pattern matches no file", pattern));
  if (status == GLOB_NOSPACE) throw std::bad_alloc();
  if (status != 0) throw_errno(pattern, "cannot list what the pattern matches");
  for (const std::string& match : matches) add_path(match, found);
}

}  // namespace

FoundFiles find_files(std::span<const std::string> paths) {
  FoundFiles found;
  for (const std::string& path : paths) {
    std::error_code code;
    const bool pattern = path.find_first_of("*?[") != std::string::npos && !fs::exists(path, code);
    pattern ? add_glob(path, found) : add_path(path, found);
  }
  for (std::string& file : found.files) file = fs::path(file).lexically_normal().string();
  std::sort(found.files.begin(), found.files.end());
  found.files.erase(std::unique(found.files.begin(), found.files.end()), found.files.end());
  for (auto* list : {&found.skipped, &found.hidden, &found.runs, &found.in_folders})
    std::ranges::sort(*list);
  return found;
}

std::vector<std::string> describe_left_out(const FoundFiles& found) {
  std::vector<std::string> notes;
  const auto add = [&](const std::vector<std::string>& paths, const char* what) {
    if (paths.empty()) return;
    notes.push_back(fmt::format("left out {} {} ({})", paths.size(), what, first_and_count(paths)));
  };
  add(found.skipped, "links or special files in folders");
  add(found.hidden, "hidden files or folders");
  add(found.runs, "folders of training runs");
  return notes;
}

std::string join_paths(std::span<const std::string> paths) {
  const bool broken = std::any_of(paths.begin(), paths.end(), [](const std::string& path) {
    return path.find_first_of("\r\n") != path.npos || without_bom(path) != path;
  });
  std::string list;
  for (const std::string& path : paths) list += path + (broken ? '\0' : '\n');
  return list;
}

std::vector<std::string> split_paths(std::string_view list) {
  const char end = list.find('\0') == std::string_view::npos ? '\n' : '\0';
  if (end == '\n') list = without_bom(list);
  std::vector<std::string> paths;
  while (!list.empty()) {
    std::string_view path = list.substr(0, list.find(end));
    list.remove_prefix(std::min(path.size() + 1, list.size()));
    if (end == '\n' && path.ends_with('\r')) path.remove_suffix(1);
    if (!path.empty()) paths.emplace_back(path);
  }
  return paths;
}

Corpus::Document Corpus::open_document(const std::string& path,
                                       const std::shared_ptr<DataFile>& content,
                                       double val_fraction) {
  FileDescriptor file = content ? content->unpacked()->duplicate() : open_for_reading(path);
  Document document;
  document.path = path;
  if (file_size(file.get(), path) >= kCopyBelow && open_files_ < max_open_files()) {
    ++open_files_;
    document.file = std::make_unique<TextFile>(std::move(file), path);
    document.content = content;
    document.size = size_t(document.file->size());
    return document;
  }
  std::string text;
  if (content) {
    document.content = content;
    text.resize(size_t(content->size()));
    content->read(0, std::as_writable_bytes(std::span(text)));
  } else {
    text = read_file(path);
  }
  document.size = text.size();
  document.hash = XXH3_64bits(text.data(), text.size());
  document.offset = block_.size();
  if (is_held_out(document.hash, val_fraction)) return document;
  const auto bytes = std::as_bytes(std::span(text));
  block_.insert(block_.end(), bytes.begin(), bytes.end());
  return document;
}

/// Opens all files and hashes those that are copied.
std::vector<Corpus::Document> Corpus::open_documents(const std::vector<std::string>& paths,
                                                     const DataFiles& contents, double val_fraction,
                                                     SharedWork& work) {
  std::vector<Document> documents;
  for (size_t i = 0; i < paths.size(); ++i) {
    const std::string& path = paths[i];
    try {
      Document document = open_document(path, contents[i], val_fraction);
      if (contents[i]) {
        contents[i]->sample(nullptr);
        document.record = make_record(*contents[i]);
      } else if (i < kMaxRecords && !is_sampled(document.size)) {
        document.record = make_record(DataFile(path, false));
      }
      work.advance(int64_t(document.file ? 0 : document.size));
      document.size > 0 ? documents.push_back(std::move(document)) : empty_.push_back(path);
    } catch (const std::bad_alloc&) {
      throw IoError(path + ": not enough memory to read it");
    }
  }
  return documents;
}

/// Also makes the records of those that are large enough for samples to save time.
void Corpus::hash_open_files(std::vector<Document>& documents, Communicator* world,
                             const Manifest& known) {
  std::vector<Document*> open;
  std::vector<const TextFile*> unknown;
  std::vector<std::optional<FileRecord>> records;
  SharedWork work(world, "sampling the text", 0);
  std::string error;
  try {
    for (Document& document : documents) {
      if (!document.file) continue;
      open.push_back(&document);
      std::optional<FileRecord>& record = records.emplace_back();
      if (document.content || !is_sampled(document.size)) {
        unknown.push_back(document.file.get());
        continue;
      }
      DataFile file(document.path, false);
      file.sample(nullptr);
      record = make_record(file);
      record->hash = known.check(*record);
      if (!record->hash) unknown.push_back(document.file.get());
      work.advance(0);
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  const std::vector<uint64_t> hashes = hash_files(world, unknown);
  size_t next = 0;
  for (size_t i = 0; i < open.size(); ++i) {
    std::optional<FileRecord>& record = records[i];
    open[i]->hash = record && record->hash ? *record->hash : hashes[next++];
    open[i]->file->expect(open[i]->hash);
    if (!record) continue;
    record->hash = open[i]->hash;
    known.check_hash(*record);
    records_.push_back(*record);
  }
}

Corpus::Corpus(std::span<const std::string> paths, double val_fraction, Communicator* world,
               const Manifest& known) {
  FoundFiles found;
  std::vector<Document> documents;
  std::string error;
  SharedWork listing(world, "listing the text", 0);
  try {
    found = find_files(paths);
  } catch (const IoError& failed) {
    error = failed.what();
  }
  listing.finish(error);
  const DataFiles contents = open_compressed(found.files, world);
  SharedWork work(world, "reading the text", 0);
  try {
    documents = open_documents(found.files, contents, val_fraction, work);
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  hash_open_files(documents, world, known);
  std::vector<uint64_t> val_hashes;
  for (Document& document : documents) {
    const bool out = is_held_out(document.hash, val_fraction);
    (out ? held_out_.files : files_).push_back(document.path);
    if (out) held_out_.contents.push_back(document.content);
    (out ? held_out_.sizes : sizes_).push_back(int64_t(document.size));
    (out ? val_hashes : hashes_).push_back(document.hash);
    if (out) continue;
    if (document.record) {
      if (!document.content) document.record->samples = document.hash;
      records_.push_back(*document.record);
    }
    documents_.push_back(std::move(document));
  }
  held_out_.identity = describe_files(held_out_.sizes, val_hashes);
  if (!empty_.empty()) {
    notes_.push_back(fmt::format("left out {} empty file{} ({})", empty_.size(),
                                 empty_.size() == 1 ? "" : "s", first_and_count(empty_)));
  }
  for (std::string& note : describe_left_out(found)) notes_.push_back(std::move(note));
  if (files_.empty()) {
    throw ConfigError(fmt::format(
        "data.paths: {} files found, {} held out, 0 bytes left to train on{}{}: expected some text",
        found.files.size(), held_out_.files.size(), notes_.empty() ? "" : "; ",
        fmt::join(notes_, "; ")));
  }
  starts_.push_back(0);
  for (const Document& document : documents_) {
    starts_.push_back(starts_.back() + 1 + int64_t(document.size));
  }
  fingerprint_ = content_hash(std::as_bytes(std::span(hashes_)));
}

std::vector<std::shared_ptr<DataFile>> Corpus::contents() const {
  std::vector<std::shared_ptr<DataFile>> contents;
  for (const Document& document : documents_) contents.push_back(document.content);
  return contents;
}

std::string Corpus::describe() const {
  return fmt::format("{} files, {} of text, {} files held out", files_.size(),
                     format_bytes(double(bytes())), held_out_.files.size());
}

std::string Corpus::identity() const {
  return describe_files(sizes_, hashes_);
}

void Corpus::read(const Document& document, size_t offset, std::span<int32_t> out) const {
  std::vector<std::byte> buffer(document.file ? out.size() : 0);
  if (document.file) document.file->read(offset, buffer);
  const std::span<const std::byte> bytes =
      document.file ? std::span<const std::byte>(buffer)
                    : std::span(block_).subspan(document.offset + offset, out.size());
  for (size_t i = 0; i < out.size(); ++i) out[i] = int32_t(bytes[i]);
}

void Corpus::read(int64_t begin, std::span<int32_t> out) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  size_t document = size_t(after - starts_.begin()) - 1, filled = 0;
  int64_t offset = begin - starts_[document];
  for (; filled < out.size() && document < documents_.size(); ++document, offset = 0) {
    if (offset == 0) out[filled++] = kBos, offset = 1;
    const auto first = size_t(offset - 1);
    const size_t count = std::min(documents_[document].size - first, out.size() - filled);
    if (count > 0) read(documents_[document], first, out.subspan(filled, count));
    filled += count;
  }
  std::fill(out.begin() + long(filled), out.end(), -1);
}

void Corpus::verify(Communicator* world) const {
  std::vector<const TextFile*> files;
  for (const Document& document : documents_) {
    if (document.file) files.push_back(document.file.get());
  }
  const std::vector<uint64_t> hashes = hash_files(world, files);
  for (size_t i = 0; i < files.size(); ++i) files[i]->verify(hashes[i]);
}

}  // namespace tandem
