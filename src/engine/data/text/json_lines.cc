#include "engine/data/text/json_lines.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <xxhash.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/data/open_contents.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/documents.h"
#include "engine/data/text/text_hashing.h"
#include "engine/data/tokens/tokenized_units.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kLineBlock = size_t(1) << 20;
constexpr size_t kMaxLine = size_t(1) << 30;

/// Calls `use(offset, line, number)` for every line of the file, without its end.
template <typename Use>
void for_each_line(const DataFile& file, const Use& use) {
  std::string pending;  // begin of a line that ends in a later block
  std::vector<char> block(std::min<uint64_t>(kLineBlock, file.size()));
  uint64_t line_begin = 0;
  int64_t number = 0;
  for (uint64_t offset = 0; offset < file.size();) {
    const size_t size = size_t(std::min<uint64_t>(block.size(), file.size() - offset));
    file.read(offset, std::as_writable_bytes(std::span(block).first(size)));
    std::string_view rest(block.data(), size);
    for (size_t end = rest.find('\n'); end != rest.npos; end = rest.find('\n')) {
      pending += rest.substr(0, end);
      use(line_begin, pending, ++number);
      line_begin += pending.size() + 1;
      pending.clear();
      rest.remove_prefix(end + 1);
    }
    pending += rest;
    if (pending.size() > kMaxLine) {
      throw IoError(fmt::format("{}:{}: has more than {} bytes in a line", file.path(), number + 1,
                                kMaxLine));
    }
    offset += size;
  }
  if (!pending.empty()) use(line_begin, pending, ++number);
}

}  // namespace

std::string parse_json_document(std::string_view line, const std::string& key) {
  try {
    const nlohmann::json root = nlohmann::json::parse(line);
    const auto text = root.is_object() ? root.find(key) : root.end();
    if (text != root.end() && text->is_string()) return text->get<std::string>();
    std::vector<std::string> strings;
    if (root.is_object()) {
      for (const auto& [name, value] : root.items()) {
        if (value.is_string()) strings.push_back(printable(name, 30));
      }
    }
    const std::string other =
        strings.empty() || key.empty()
            ? ""
            : fmt::format(" (texts under {}: data.text_key)", fmt::join(strings, ", "));
    throw InvalidArgument(fmt::format("{}: expected {{\"{}\": \"...\"}}{}", printable(line, 60),
                                      printable(key), other));
  } catch (const nlohmann::json::exception& failed) {
    throw InvalidArgument(fmt::format("{}: expected {{\"{}\": \"...\"}}",
                                      printable(failed.what(), 120), printable(key)));
  }
}

bool is_blank_line(std::string_view line) {
  return line.find_first_not_of(" \t\r") == line.npos;
}

TextLines::TextLines(std::shared_ptr<const Tokenizer> tokenizer, std::string text_key)
    : tokenizer_(std::move(tokenizer)), text_key_(std::move(text_key)) {}

LineDocument TextLines::parse(std::string_view line) const {
  LineDocument document;
  const std::string text = parse_json_document(line, text_key_);
  tokenizer_->append(text, document.tokens);
  document.hash = XXH3_64bits(text.data(), text.size());
  return document;
}

void TextLines::append(std::string_view line, std::vector<int32_t>& tokens) const {
  tokenizer_->append(parse_json_document(line, text_key_), tokens);
}

JsonLines::JsonLines(Files files, std::shared_ptr<const LineFormat> lines)
    : files_(std::move(files)), lines_(std::move(lines)) {}

JsonLines::JsonLines(std::span<const std::string> paths, double val_fraction,
                     std::shared_ptr<const LineFormat> lines, Communicator* world)
    : JsonLines(open_contents(paths, world), std::move(lines)) {
  SharedWork work(world, "reading the documents", 0);
  std::string error;
  std::shared_ptr<JsonLines> held_out;
  try {
    held_out.reset(new JsonLines(files_, lines_));
    for (uint32_t i = 0; i < files_.size(); ++i) index(i, val_fraction, *held_out, work);
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  if (tokens() < 2) {
    throw ConfigError(fmt::format(
        "data.paths: {} files, {} documents held out, {} left to train on: expected some text",
        paths.size(), held_out->documents_.size(), documents_.size()));
  }
  finish();
  records_ = make_records(files_);
  if (held_out->documents_.empty()) return;
  held_out->finish();
  held_out_.identity = held_out->identity();
  held_out_.stream = std::move(held_out);
}

void JsonLines::index(uint32_t file, double val_fraction, JsonLines& held_out, SharedWork& work) {
  for_each_line(*files_[file], [&](uint64_t offset, std::string_view line, int64_t number) {
    work.advance(int64_t(line.size()) + 1);
    if (is_blank_line(line)) return;
    try {
      const LineDocument document = lines_->parse(line);
      JsonLines& split = is_held_out(document.hash, val_fraction) ? held_out : *this;
      split.add({offset, uint32_t(line.size()), file}, document);
    } catch (const InvalidArgument& failed) {
      throw IoError(fmt::format("{}:{}: {}", files_[file]->path(), number, failed.what()));
    }
  });
}

void JsonLines::add(const Document& position, const LineDocument& document) {
  documents_.push_back(position);
  hashes_.push_back(document.hash);
  for (const int64_t boundary : document.answers) scored_.push_back(tokens() + boundary);
  const auto& tokens_of = document.tokens;
  starts_.push_back(starts_.back() + int64_t(tokens_of.size()));
  const int32_t first = tokens_of.empty() || !document.answers.empty() ? -1 : tokens_of[0];
  start_token_ = start_token_.value_or(first) == first ? first : -1;
}

void JsonLines::finish() {
  std::string identity = lines_->name() + content_hash(std::as_bytes(std::span(hashes_)));
  if (!scored_.empty()) identity += content_hash(std::as_bytes(std::span(scored_)));
  fingerprint_ = content_hash(identity);
  hashes_ = {};
}

void JsonLines::read(int64_t begin, std::span<int32_t> out) const {
  std::string line;
  read_units(starts_, begin, out, [&](size_t document, std::vector<int32_t>& tokens) {
    const Document& from = documents_[document];
    const DataFile& file = *files_[from.file];
    line.resize(from.bytes);
    file.read(from.offset, std::as_writable_bytes(std::span(line)));
    try {
      lines_->append(line, tokens);
    } catch (const InvalidArgument&) {
      tokens.clear();
    }
    const int64_t count = starts_[document + 1] - starts_[document];
    if (int64_t(tokens.size()) == count) return;
    throw IoError(
        fmt::format("{}: changed while it is trained on: the document at byte {} has {} "
                    "tokens: expected {}",
                    file.path(), from.offset, tokens.size(), count));
  });
}

void JsonLines::verify(Communicator* world) const {
  verify_files(files_, world, "verifying the documents");
}

std::string JsonLines::describe() const {
  std::string text = fmt::format("{} file{} of JSON Lines, {} documents, {} tokens", files_.size(),
                                 files_.size() == 1 ? "" : "s", documents_.size(), tokens());
  if (const int64_t scored = count_scored(*this, 0, tokens()); scored < tokens()) {
    text += fmt::format(", {} of them in answers", scored);
  }
  if (held_out_.stream) text += fmt::format(", {} tokens held out", held_out_.stream->tokens());
  return text;
}

std::string JsonLines::identity() const {
  return fmt::format("{} documents, {} tokens, hash {}", documents_.size(), tokens(),
                     fingerprint());
}

}  // namespace tandem
