#include "engine/data/tokens/tokenized_text.h"

#include <fmt/format.h>

#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "core/system/files.h"
#include "engine/data/open_contents.h"
#include "engine/data/text/text_hashing.h"
#include "engine/data/tokens/tokenized_units.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr size_t kMinBlock = size_t(8) << 10, kMaxBlock = kTextWindow - 1;
constexpr size_t kScanned = size_t(1) << 20;  // bytes at once

bool is_blank(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

/// Calls `use(begin, end)` for each document of the file.
template <typename Use>
void for_each_document(const DataFile& file, const std::string& separator, const Use& use) {
  uint64_t begin = 0;
  const auto end_document = [&](uint64_t end) {
    if (end > begin) use(begin, end);
    begin = end + separator.size();
  };
  std::string text;
  const size_t window = std::max(kScanned, 4 * separator.size());
  for (uint64_t offset = 0; !separator.empty() && offset + separator.size() <= file.size();) {
    text.resize(size_t(std::min<uint64_t>(window, file.size() - offset)));
    file.read(offset, std::as_writable_bytes(std::span(text)));
    size_t at = 0;
    for (size_t found = text.find(separator); found != text.npos;
         found = text.find(separator, at)) {
      end_document(offset + found);
      at = found + separator.size();
    }
    offset += std::max(at, text.size() - separator.size() + 1);
  }
  end_document(file.size());
}

/// XXH3-64 of the bytes.
uint64_t hash_range(const DataFile& file, uint64_t begin, uint64_t end) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  if (!state) throw std::bad_alloc();
  XXH3_64bits_reset(state.get());
  std::vector<std::byte> block(size_t(std::min<uint64_t>(kScanned, end - begin)));
  while (begin < end) {
    const auto range =
        std::span(block).first(size_t(std::min<uint64_t>(block.size(), end - begin)));
    file.read(begin, range);
    XXH3_64bits_update(state.get(), range.data(), range.size());
    begin += range.size();
  }
  return XXH3_64bits_digest(state.get());
}

}  // namespace

size_t text_block(std::string_view text, bool is_end) {
  const size_t max = std::min(text.size(), kMaxBlock);
  for (size_t at = kMinBlock; at < max; ++at) {
    if (text[at - 1] == '\n' && !is_blank(text[at])) return at;
  }
  if (max == text.size() && is_end) return max;
  size_t at = max;
  while (at > max - 3 && (uint8_t(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

TokenizedText::TokenizedText(Files files, std::shared_ptr<const Tokenizer> tokenizer)
    : files_(std::move(files)), tokenizer_(std::move(tokenizer)) {}

TokenizedText::TokenizedText(std::span<const std::string> paths, double val_fraction,
                             std::shared_ptr<const Tokenizer> tokenizer, Communicator* world,
                             const std::string& separator)
    : files_(open_contents(paths, world)), tokenizer_(std::move(tokenizer)) {
  SharedWork work(world, "tokenizing the text", 0);
  std::string error;
  std::shared_ptr<TokenizedText> held_out;
  try {
    held_out.reset(new TokenizedText(files_, tokenizer_));
    for (uint32_t i = 0; i < files_.size(); ++i) {
      const DataFile& file = *files_[i];
      for_each_document(file, separator, [&](uint64_t begin, uint64_t end) {
        const uint64_t hash =
            separator.empty() ? file.content_hash() : hash_range(file, begin, end);
        TokenizedText& split = is_held_out(hash, val_fraction) ? *held_out : *this;
        split.index_document(i, begin, end, hash, work);
      });
    }
  } catch (const IoError& failed) {
    error = failed.what();
  }
  work.finish(error);
  if (tokens() < 2) {
    throw ConfigError(
        fmt::format("data.paths: {} files, {} documents held out, {} left to train on: expected "
                    "some text",
                    paths.size(), held_out->hashes_.size(), hashes_.size()));
  }
  finish();
  records_ = make_records(files_);
  if (held_out->blocks_.empty()) return;
  held_out->finish();
  held_out_.identity = held_out->identity();
  held_out_.stream = std::move(held_out);
}

void TokenizedText::index_document(uint32_t file, uint64_t begin, uint64_t end, uint64_t hash,
                                   SharedWork& work) {
  const DataFile& from = *files_[file];
  std::vector<int32_t> tokens;
  std::vector<char> text;
  for (uint64_t offset = begin; offset < end;) {
    // One byte more than a block, which tells whether a line may end it.
    text.resize(size_t(std::min<uint64_t>(kTextWindow, end - offset)));
    from.read(offset, std::as_writable_bytes(std::span(text)));
    const bool is_end = offset + text.size() == end;
    const size_t size = text_block({text.data(), text.size()}, is_end);
    const Block block{offset, uint32_t(size), file, offset == begin};
    tokens.clear();
    tokenize(block, {text.data(), size}, tokens);
    if (block.begins) {
      document_begins_.push_back(starts_.back());
      start_token_ = tokens[0];
    }
    blocks_.push_back(block);
    starts_.push_back(starts_.back() + int64_t(tokens.size()));
    work.advance(int64_t(size));
    offset += size;
  }
  hashes_.push_back(hash);
}

void TokenizedText::tokenize(const Block& block, std::string_view text,
                             std::vector<int32_t>& tokens) const {
  block.begins ? tokenizer_->append(text, tokens) : tokenizer_->append_more(text, tokens);
}

void TokenizedText::finish() {
  document_begins_.push_back(tokens());
  fingerprint_ = content_hash(tokenizer_->name() + content_hash(std::as_bytes(std::span(hashes_))));
}

void TokenizedText::read(int64_t begin, std::span<int32_t> out) const {
  std::string text;
  read_units(starts_, begin, out, [&](size_t index, std::vector<int32_t>& tokens) {
    const Block& block = blocks_[index];
    const DataFile& file = *files_[block.file];
    text.resize(block.bytes);
    file.read(block.offset, std::as_writable_bytes(std::span(text)));
    tokenize(block, text, tokens);
    const int64_t count = starts_[index + 1] - starts_[index];
    if (int64_t(tokens.size()) == count) return;
    throw IoError(
        fmt::format("{}: changed while it is trained on: the text at byte {} has {} tokens: "
                    "expected {}",
                    file.path(), block.offset, tokens.size(), count));
  });
}

void TokenizedText::verify(Communicator* world) const {
  verify_files(files_, world, "verifying the text");
}

std::string TokenizedText::describe() const {
  std::string text = fmt::format("{} file{} of text, {} tokens of {} document{}", files_.size(),
                                 files_.size() == 1 ? "" : "s", tokens(), hashes_.size(),
                                 hashes_.size() == 1 ? "" : "s");
  if (held_out_.stream) text += fmt::format(", {} tokens held out", held_out_.stream->tokens());
  return text;
}

std::string TokenizedText::identity() const {
  return fmt::format("{} documents, {} tokens, hash {}", hashes_.size(), tokens(), fingerprint());
}

}  // namespace tandem
