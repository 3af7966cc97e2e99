#include "engine/data/stream/stream_shards.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/data/text/json_lines.h"
#include "engine/data/tokens/token_files.h"
#include "engine/data/tokens/tokenized_text.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr uint64_t kUnitTokens = uint64_t(16) << 10;
constexpr uint64_t kUnitBytes = uint64_t(8) << 10;   // of JSON Lines, at least
constexpr uint64_t kReadBytes = uint64_t(64) << 10;  // at once
constexpr uint64_t kMaxLineBytes = uint64_t(1) << 30;

class TokenShard : public ShardReader {
 public:
  TokenShard(const std::string& path, const ShardFormat& format)
      : file_(path, 0, format.vocab, true), separator_(format.separator_token) {
    if (separator_ >= 0 || !format.reads_documents) return;
    if (file_.layout().documents > 0) begins_ = read_index_begins(index_path(path));
  }
  FileRecord record() const { return file_.record(); }
  uint64_t reach(uint64_t end) const override {
    return std::min(end, uint64_t(file_.layout().tokens));
  }
  ShardUnit read(uint64_t offset) const override {
    ShardUnit unit;
    unit.end = reach(offset + kUnitTokens);
    unit.tokens.resize(unit.end - offset);
    file_.read(int64_t(offset), unit.tokens);
    if (separator_ >= 0) add_separated(offset, unit);
    auto begin = std::ranges::lower_bound(begins_, int64_t(offset));
    for (; begin != begins_.end() && *begin < int64_t(unit.end); ++begin) {
      unit.document_begins.push_back(int32_t(*begin - int64_t(offset)));
    }
    return unit;
  }
  void verify() const override { file_.verify(); }
  int64_t unit_tokens() const override { return int64_t(kUnitTokens); }

 private:
  void add_separated(uint64_t offset, ShardUnit& unit) const {
    for (size_t i = 0; i < unit.tokens.size(); ++i) {
      if (offset + i == 0 || unit.tokens[i] == separator_) {
        unit.document_begins.push_back(int32_t(i));
      }
    }
  }

  TokenFile file_;
  int32_t separator_;
  std::vector<int64_t> begins_;
};

/// File of text or JSON Lines, whose offsets are bytes.
class TextShard : public ShardReader {
 public:
  TextShard(const std::string& path, const ShardFormat& format)
      : file_(path, true, Content::unpacked),
        tokenizer_(format.tokenizer),
        separator_(format.separator),
        text_key_(format.text_key) {
    file_.sample(nullptr);
  }
  FileRecord record() const { return make_record(file_); }
  uint64_t reach(uint64_t end) const override { return file_.reach(end); }
  void verify() const override { file_.verify(); }

 protected:
  /// Bytes from `offset` on, up to the end of the file.
  void read_bytes(uint64_t offset, uint64_t max, std::string& bytes) const {
    bytes.resize(reach(offset + max) - offset);
    file_.read(offset, std::as_writable_bytes(std::span(bytes)));
  }
  const std::string& path() const { return file_.path(); }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const std::string& separator() const { return separator_; }
  const std::string& text_key() const { return text_key_; }

 private:
  DataFile file_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string separator_, text_key_;
};

/// The documents and blocks of TokenizedText.
class DocumentShard : public TextShard {
 public:
  using TextShard::TextShard;
  ShardUnit read(uint64_t offset) const override {
    std::string text;
    read_bytes(offset, kTextWindow + separator().size(), text);
    std::string_view rest = text;
    ShardUnit unit;
    bool begins = begins_document(offset);
    begins = skip_separators(rest) || begins;
    const uint64_t begin = offset + (text.size() - rest.size());
    const size_t end = separator().empty() ? rest.npos : rest.find(separator());
    const std::string_view window = rest.substr(0, std::min(end, kTextWindow));
    const bool is_end = window.size() == end || ends_at(begin + window.size());
    const bool is_cut = rest.size() < kTextWindow + separator().size() &&
                        !ends_at(offset + text.size()) && end == rest.npos;
    if (is_cut) {  // by separators before it
      unit.end = begin;
      return unit;
    }
    const std::string_view block = window.substr(0, text_block(window, is_end));
    unit.end = begin + block.size();
    if (block.empty()) return unit;
    if (!begins) {
      tokenizer().append_more(block, unit.tokens);
      return unit;
    }
    tokenizer().append(block, unit.tokens);
    unit.document_begins.push_back(0);
    return unit;
  }

 private:
  /// Whether there were some.
  bool skip_separators(std::string_view& text) const {
    const size_t before = text.size();
    while (!separator().empty() && text.starts_with(separator())) {
      text.remove_prefix(separator().size());
    }
    return text.size() < before;
  }
  bool begins_document(uint64_t offset) const {
    const size_t bytes = separator().size();
    if (offset == 0 || bytes == 0 || offset < bytes) return offset == 0;
    std::string before;
    read_bytes(offset - bytes, bytes, before);
    return before == separator();
  }
};

class JsonLinesShard : public TextShard {
 public:
  using TextShard::TextShard;
  ShardUnit read(uint64_t offset) const override {
    std::string bytes;
    ShardUnit unit;
    unit.end = offset;
    for (uint64_t max = kReadBytes; unit.end == offset; max *= 4) {
      read_bytes(offset, max, bytes);
      const bool is_end = ends_at(offset + bytes.size());
      std::string_view rest = bytes;
      while (!rest.empty() && unit.end < offset + kUnitBytes) {
        size_t end = rest.find('\n');
        if (end == rest.npos && !is_end) break;
        end = std::min(end, rest.size());
        add_line(rest.substr(0, end), unit.end, unit);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        unit.end = offset + (bytes.size() - rest.size());
      }
      if (unit.end == offset && bytes.size() > kMaxLineBytes) {
        throw IoError(fmt::format("{}: the line at byte {} has more than {} bytes", path(), offset,
                                  kMaxLineBytes));
      }
    }
    return unit;
  }

 private:
  void add_line(std::string_view line, uint64_t at, ShardUnit& unit) const {
    if (is_blank_line(line)) return;
    unit.document_begins.push_back(int32_t(unit.tokens.size()));
    try {
      tokenizer().append(parse_json_document(line, text_key()), unit.tokens);
    } catch (const InvalidArgument& failed) {
      throw IoError(fmt::format("{}: the line at byte {}: {}", path(), at, failed.what()));
    }
  }
};

template <typename Type>
std::unique_ptr<ShardReader> open_as(const ShardFile& file, const ShardFormat& format,
                                     const Manifest& known) {
  auto shard = std::make_unique<Type>(file.path, format);
  const FileRecord now = shard->record();
  if (now.bytes != file.bytes) {
    throw IoError(fmt::format("{}: changed since the run began: holds {} bytes: expected {}",
                              file.path, now.bytes, file.bytes));
  }
  if (now.modified_ns != file.modified_ns) {
    throw IoError(file.path + ": was written to since the run began: expected no change");
  }
  known.check(now);
  return shard;
}

}  // namespace

ShardFile list_shard(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) throw_errno(path, "cannot look at it");
  return {path, uint64_t(status.st_size),
          int64_t(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

std::unique_ptr<ShardReader> open_shard(const ShardFile& file, const ShardFormat& format,
                                        const Manifest& known) {
  if (format.name == "tokens") return open_as<TokenShard>(file, format, known);
  if (format.name == "jsonl") return open_as<JsonLinesShard>(file, format, known);
  return open_as<DocumentShard>(file, format, known);
}

}  // namespace tandem
