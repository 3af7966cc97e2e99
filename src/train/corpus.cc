#include "train/corpus.h"

#include <fmt/format.h>
#include <glob.h>
#include <xxhash.h>

#include <algorithm>
#include <filesystem>

#include "model/config.h"
#include "tandem/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr size_t kMapFrom = 256 * 1024;

void add_folder(const fs::path& folder, std::vector<std::string>& files) {
  std::error_code code;
  fs::recursive_directory_iterator at(folder, code), end;
  while (!code && at != end) {
    if (at->symlink_status().type() == fs::file_type::regular) files.push_back(at->path().string());
    at.increment(code);
  }
  if (code) throw IoError(fmt::format("{}: cannot list: {}", folder.string(), code.message()));
}

void add_path(const std::string& path, std::vector<std::string>& files) {
  std::error_code code;
  if (fs::is_directory(path, code)) {
    add_folder(path, files);
  } else if (fs::is_regular_file(path, code)) {
    files.push_back(path);
  } else {
    throw IoError(fmt::format("{}: no such file or folder", path));
  }
}

void add_glob(const std::string& pattern, std::vector<std::string>& files) {
  glob_t found{};
  const int status = ::glob(pattern.c_str(), GLOB_ERR, nullptr, &found);
  const std::vector<std::string> matches(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  ::globfree(&found);
  if (status != 0) throw IoError(fmt::format("{}: the pattern matches no file", pattern));
  for (const std::string& match : matches) add_path(match, files);
}

}  // namespace

std::vector<std::string> find_files(std::span<const std::string> paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code code;
    const bool pattern = path.find_first_of("*?[") != std::string::npos && !fs::exists(path, code);
    pattern ? add_glob(path, files) : add_path(path, files);
  }
  for (std::string& file : files) file = fs::path(file).lexically_normal().string();
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

Corpus::Corpus(std::span<const std::string> paths, double heldout) {
  struct Piece {
    size_t offset, size;
    bool mapped;
  };
  const std::vector<std::string> found = find_files(paths);
  std::vector<Piece> pieces;
  std::vector<uint64_t> hashes;
  for (const std::string& path : found) {
    MappedFile file(path);
    const auto bytes = file.bytes();
    if (bytes.empty()) continue;
    const uint64_t hash = XXH3_64bits(bytes.data(), bytes.size());
    if (double(hash) * 0x1p-64 < heldout) {
      heldout_.push_back(path);
      continue;
    }
    files_.push_back(path);
    hashes.push_back(hash);
    if (bytes.size() >= kMapFrom) {
      pieces.push_back({mappings_.size(), bytes.size(), true});
      mappings_.push_back(std::move(file));
    } else {
      pieces.push_back({block_.size(), bytes.size(), false});
      block_.insert(block_.end(), bytes.begin(), bytes.end());
    }
  }
  if (files_.empty()) {
    throw ConfigError(fmt::format(
        "data.paths: {} files found, {} held out, 0 bytes left to train on: expected some text",
        found.size(), heldout_.size()));
  }
  starts_.push_back(0);
  for (const Piece& piece : pieces) {
    documents_.push_back(
        piece.mapped ? mappings_[piece.offset].bytes()
                     : std::span<const std::byte>(block_).subspan(piece.offset, piece.size));
    starts_.push_back(starts_.back() + 1 + int64_t(piece.size));
  }
  fingerprint_ = content_hash(std::as_bytes(std::span(hashes)));
}

void Corpus::read(int64_t begin, std::span<int32_t> out) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  size_t document = size_t(after - starts_.begin()) - 1, filled = 0;
  int64_t offset = begin - starts_[document];
  for (; filled < out.size() && document < documents_.size(); ++document, offset = 0) {
    if (offset == 0) out[filled++] = kBos, offset = 1;
    const auto bytes = documents_[document].subspan(size_t(offset - 1));
    const size_t count = std::min(bytes.size(), out.size() - filled);
    for (size_t i = 0; i < count; ++i) out[filled + i] = int32_t(bytes[i]);
    filled += count;
  }
  std::fill(out.begin() + long(filled), out.end(), -1);
}

}  // namespace tandem
