#include "engine/data/tokens/token_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "core/system/files.h"
#include "engine/data/data_kind.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/tokens/tokenized_units.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kReadTokens = int64_t(1) << 20;  // at once

}  // namespace

TokenFile::TokenFile(const std::string& path, double val_fraction, int64_t vocab, bool stays_open,
                     int32_t separator)
    : layout_(read_token_layout(path, val_fraction)), vocab_(vocab), file_(path, stays_open) {
  const auto item = uint64_t(bytes_of(layout_.type));
  const uint64_t end = layout_.offset + uint64_t(layout_.tokens) * item;
  if (file_.size() != end) {
    throw IoError(fmt::format("{}: changed while it was opened: holds {} bytes: expected {}", path,
                              file_.size(), end));
  }
  std::vector<int32_t> tokens;
  file_.sample([&](uint64_t offset, std::span<const std::byte> bytes) {
    // The block need not begin with a whole token.
    const uint64_t first =
        offset <= layout_.offset ? 0 : (offset - layout_.offset + item - 1) / item;
    const uint64_t skipped = layout_.offset + first * item - offset;
    if (skipped >= bytes.size()) return;
    tokens.resize((bytes.size() - skipped) / item);
    widen(int64_t(first), bytes.subspan(skipped, tokens.size() * item), tokens);
  });
  if (separator >= 0 && layout_.training_tokens < layout_.tokens) cut_at_separator(separator);
}

/// Moves the begin of the held-out tokens to that of the next document; without one none are.
void TokenFile::cut_at_separator(int32_t separator) {
  std::vector<int32_t> tokens(1);
  read(0, tokens);
  const bool begins_documents = tokens[0] == separator;
  for (int64_t at = layout_.training_tokens; at < layout_.tokens; at += int64_t(tokens.size())) {
    tokens.resize(size_t(std::min(kReadTokens, layout_.tokens - at)));
    read(at, tokens);
    const auto found = std::ranges::find(tokens, separator);
    if (found == tokens.end()) continue;
    layout_.training_tokens = at + (found - tokens.begin()) + (begins_documents ? 0 : 1);
    return;
  }
  layout_.training_tokens = layout_.tokens;
}

/// `begin`: number of the first token in the file.
void TokenFile::widen(int64_t begin, std::span<const std::byte> bytes,
                      std::span<int32_t> out) const {
  StrayToken stray;
  if (widen_tokens(layout_.type, bytes, vocab_, out, stray)) return;
  throw IoError(fmt::format("{}: token {} is {}: expected 0 to {}, below model.vocab", path(),
                            begin + stray.index, stray.value, vocab_ - 1));
}

void TokenFile::read(int64_t begin, std::span<int32_t> out) const {
  const auto item = size_t(bytes_of(layout_.type));
  std::vector<std::byte> bytes(out.size() * item);
  file_.read(layout_.offset + uint64_t(begin) * item, bytes);
  widen(begin, bytes, out);
}

TokenFiles::TokenFiles(std::span<const std::string> paths, double val_fraction, int64_t vocab,
                       Communicator* world, const Manifest& known, int32_t separator)
    : separator_(separator) {
  std::vector<TokenRange> training, held_out;
  std::string error;
  int64_t tokens = 0;
  SharedWork work(world, "reading the token files", 0);
  try {
    for (size_t i = 0; i < paths.size(); ++i) {
      const auto file = std::make_shared<const TokenFile>(paths[i], val_fraction, vocab,
                                                          i < max_open_files(), separator);
      const TokenLayout& layout = file->layout();
      tokens += layout.tokens;
      documents_ += layout.documents;
      const int64_t cut = layout.training_tokens;
      if (cut > 0) training.push_back({file, 0, cut});
      if (cut < layout.tokens) held_out.push_back({file, cut, layout.tokens - cut});
      if (layout.offset == 0 && layout.documents == 0 && layout.type != TokenType::u16) {
        notes_.push_back(
            fmt::format("{}: read as {}, as the upper halves of its words are 0 or little",
                        paths[i], name_of(layout.type)));
      }
      if (layout.tokens == 0)
        notes_.push_back(fmt::format("left out {}, which is empty", paths[i]));
      FileRecord& record = records_.emplace_back(file->record());
      record.hash = known.check(record);
      if (const std::string note = known.describe_write(record); !note.empty()) {
        notes_.push_back(note);
      }
      work.advance(0);
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  set_ranges(std::move(training));
  if (this->tokens() < 2) {
    throw ConfigError(fmt::format(
        "data.paths: {} token files, {} tokens, {} left to train on: expected at least 2",
        paths.size(), tokens, this->tokens()));
  }
  if (held_out.empty()) return;
  held_out_.stream = std::make_shared<TokenFiles>(std::move(held_out), separator);
  held_out_.identity = held_out_.stream->identity();
}

TokenFiles::TokenFiles(std::vector<TokenRange> ranges, int32_t separator) : separator_(separator) {
  set_ranges(std::move(ranges));
}

void TokenFiles::set_ranges(std::vector<TokenRange> ranges) {
  ranges_ = std::move(ranges);
  starts_ = {0};
  std::string hashes;
  for (const TokenRange& range : ranges_) {
    starts_.push_back(starts_.back() + range.count);
    hashes += fmt::format("{} {} {} {:x}\n", name_of(range.file->layout().type), range.begin,
                          range.count, range.file->hash());
  }
  fingerprint_ = content_hash(hashes);
}

void TokenFiles::read(int64_t begin, std::span<int32_t> out) const {
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  size_t range = size_t(after - starts_.begin()) - 1, filled = 0;
  for (; filled < out.size() && range < ranges_.size(); ++range) {
    const TokenRange& from = ranges_[range];
    const int64_t skipped = begin + int64_t(filled) - starts_[range];
    const auto count =
        size_t(std::min<int64_t>(from.count - skipped, int64_t(out.size() - filled)));
    from.file->read(from.begin + skipped, out.subspan(filled, count));
    filled += count;
  }
  std::fill(out.begin() + long(filled), out.end(), -1);
}

std::span<const int64_t> TokenFiles::document_begins() const {
  std::call_once(once_, [&] { read_document_begins(); });
  return document_begins_;
}

std::span<const int64_t> TokenFiles::unpredicted_begins() const {
  const std::span<const int64_t> begins = document_begins();
  return separator_ < 0 ? begins : unpredicted_begins_;
}

void TokenFiles::read_document_begins() const {
  separator_ < 0 ? read_index_documents() : read_separated_documents();
}

/// A range begins a document unless the one before ends with a separator. One at the end of the
/// stream begins none: it ends the last document, which has it as the start token after it.
void TokenFiles::read_separated_documents() const {
  std::vector<int64_t> begins, unpredicted;
  std::vector<int32_t> tokens;
  int32_t before = -1;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const TokenRange& range = ranges_[i];
    for (int64_t at = 0; at < range.count; at += int64_t(tokens.size())) {
      tokens.resize(size_t(std::min(kReadTokens, range.count - at)));
      range.file->read(range.begin + at, tokens);
      for (size_t j = 0; j < tokens.size(); ++j) {
        const int64_t position = starts_[i] + at + int64_t(j);
        const bool is_separator = tokens[j] == separator_;
        const bool is_bare = at + int64_t(j) == 0 && !is_separator && before != separator_;
        if (is_separator || is_bare) begins.push_back(position);
        if (is_bare) unpredicted.push_back(position);
        before = tokens[j];
      }
    }
  }
  if (before != separator_) begins.push_back(starts_.back());
  unpredicted_begins_ = std::move(unpredicted);
  document_begins_ = std::move(begins);
}

/// The rest of a document whose begin is in another range is one of its own.
void TokenFiles::read_index_documents() const {
  std::vector<int64_t> begins;
  for (size_t i = 0; i < ranges_.size(); ++i) {
    const TokenRange& range = ranges_[i];
    if (range.file->layout().documents == 0) return;
    begins.push_back(starts_[i]);
    for (const int64_t begin : read_index_begins(index_path(range.file->path()))) {
      const int64_t in_range = begin - range.begin;
      if (in_range > 0 && in_range < range.count) begins.push_back(starts_[i] + in_range);
    }
  }
  begins.push_back(tokens());
  document_begins_ = std::move(begins);
}

void TokenFiles::verify(Communicator* world) const {
  verify_files(std::views::transform(ranges_, &TokenRange::file), world,
               "verifying the token files");
}

std::string TokenFiles::describe() const {
  std::string text = fmt::format("{} token file{}, {} tokens", ranges_.size(),
                                 ranges_.size() == 1 ? "" : "s", tokens());
  if (documents_ > 0) text += fmt::format(" of {} documents", documents_);
  if (held_out_.stream) text += fmt::format(", {} tokens held out", held_out_.stream->tokens());
  return text;
}

std::string TokenFiles::identity() const {
  return fmt::format("{} files, {} tokens, hash {}", ranges_.size(), tokens(), fingerprint());
}

bool is_token_prefix(const std::string& path) {
  return !path_exists(path) && path_exists(path + ".bin") && path_exists(path + ".idx");
}

std::vector<std::string> find_token_files(std::span<const std::string> paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!is_token_file(path)) {
      throw IoError(
          fmt::format("{}: no token file: expected .bin, with or without .idx, or .npy", path));
    }
    if (!has_ending(path, ".idx")) {
      files.push_back(path);
      continue;
    }
    const std::string bin = replace_ending(path, ".bin");
    if (!path_exists(bin))
      throw IoError(fmt::format("{}: no such file: {} belongs to it", bin, path));
    files.push_back(bin);
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

}  // namespace tandem
