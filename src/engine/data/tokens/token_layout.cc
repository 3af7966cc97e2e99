#include "engine/data/tokens/token_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "core/system/files.h"
#include "engine/data/data_kind.h"
#include "tandem/error.h"

namespace tandem {
namespace {

template <typename T>
bool widen(std::span<const std::byte> bytes, int64_t vocab, std::span<int32_t> out,
           StrayToken& stray) {
  bool all_inside = true;
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    all_inside &= uint64_t(int64_t(value)) < uint64_t(vocab);
    out[i] = int32_t(value);
  }
  if (all_inside) return true;
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    if (uint64_t(int64_t(value)) < uint64_t(vocab)) continue;
    stray = {int64_t(i), int64_t(value)};
    break;
  }
  return false;
}

/// Tokens of `tokens` that are trained on if the last `fraction` is held out.
int64_t training_share(int64_t tokens, double fraction) {
  return tokens - int64_t(double(tokens) * fraction);
}

/// Header of llm.c's files: 256 int32, the first three are the kind, a version and the tokens.
constexpr int32_t kLlmcUint16 = 20240520, kLlmcUint32 = 20240801, kLlmcVersion = 1;
constexpr uint64_t kLlmcHeader = 256 * sizeof(int32_t);

std::optional<TokenLayout> read_llmc_header(const std::string& path, int fd, uint64_t bytes) {
  std::array<int32_t, 3> header{};
  if (bytes < kLlmcHeader || read_at(fd, path, header.data(), sizeof header, 0) < sizeof header) {
    return {};
  }
  const auto [kind, version, tokens] = header;
  if (kind != kLlmcUint16 && kind != kLlmcUint32) return {};
  TokenLayout layout;
  layout.type = kind == kLlmcUint16 ? TokenType::u16 : TokenType::u32;
  layout.offset = kLlmcHeader;
  layout.tokens = tokens;
  const uint64_t expected = kLlmcHeader + uint64_t(tokens) * uint64_t(bytes_of(layout.type));
  if (version != kLlmcVersion || tokens < 0 || bytes != expected) {
    throw IoError(fmt::format(
        "{}: llm.c's header says version {} and {} tokens of {}, the file holds {} bytes: expected "
        "version {} and {} bytes",
        path, version, tokens, name_of(layout.type), bytes, kLlmcVersion, expected));
  }
  return layout;
}

constexpr size_t kGuessed = size_t(64) << 10;  // bytes
constexpr size_t kMinWords = 64;
constexpr uint16_t kMaxHigh = 16;  // upper halves of tokens below 2^20

/// Type of tokens without a header. Wider ones than uint16 are known by the upper halves of their
/// words, which are 0 or little.
TokenType guess_type(std::span<const uint16_t> words, uint64_t bytes) {
  const auto are_high = [&](size_t first, size_t step) {
    size_t zeros = 0, all = 0;
    for (size_t i = first; i < words.size(); i += step, ++all) {
      if (words[i] >= kMaxHigh) return false;
      zeros += words[i] == 0;
    }
    return 2 * zeros > all;
  };
  const bool is_certain =
      words.size() >= kMinWords &&
      std::ranges::any_of(words, [](uint16_t word) { return word >= kMaxHigh; });
  if (!is_certain || bytes % 4 != 0 || !are_high(1, 2)) return TokenType::u16;
  const bool is_64 = bytes % 8 == 0 && are_high(2, 4) && are_high(3, 4);
  return is_64 ? TokenType::i64 : TokenType::u32;
}

TokenLayout read_raw_layout(const std::string& path) {
  const FileDescriptor file = open_for_reading(path);
  const uint64_t bytes = file_size(file.get(), path);
  if (const auto layout = read_llmc_header(path, file.get(), bytes)) return *layout;
  std::vector<uint16_t> words(size_t(std::min<uint64_t>(bytes, kGuessed)) / 2);
  words.resize(read_at(file.get(), path, words.data(), 2 * words.size(), 0) / 2);
  TokenLayout layout;
  layout.type = guess_type(words, bytes);
  if (bytes % 2 != 0) {
    throw IoError(fmt::format(
        "{}: holds {} bytes and has no .idx: expected uint16 tokens, an even number", path, bytes));
  }
  layout.tokens = int64_t(bytes) / bytes_of(layout.type);
  return layout;
}

/// Dictionary literal in a .npy header, as numpy writes it: three keys in any order.
class NpyHeader {
 public:
  NpyHeader(std::string_view text, const std::string& path) : text_(text), path_(path) {
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        type_ = type(string());
      } else if (key == "fortran_order") {
        fortran_ = boolean();
      } else if (key == "shape") {
        count_ = shape();
      } else {
        fail(fmt::format("has the key '{}'", key), "'descr', 'fortran_order' and 'shape'");
      }
      if (!accept(',') && peek() != '}') fail_at();
    }
    if (!type_ || !fortran_ || !count_) {
      fail("misses a key", "'descr', 'fortran_order' and 'shape'");
    }
    if (*fortran_) fail("has Fortran order", "C order");
    skip_space();
    if (at_ != text_.size()) fail_at();
  }
  TokenType token_type() const { return *type_; }
  int64_t count() const { return *count_; }

 private:
  [[noreturn]] void fail(const std::string& found, std::string_view expected) const {
    throw IoError(fmt::format("{}: its header {}: expected {}", path_, found, expected));
  }
  [[noreturn]] void fail_at() const {
    fail(fmt::format("is damaged at character {}", at_), "a header that numpy writes");
  }
  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  char peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) fail_at();
  }
  std::string string() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') fail_at();
    const size_t end = text_.find(quote, at_ + 1);
    if (end == text_.npos || end - at_ > 64) fail_at();
    const std::string value(text_.substr(at_ + 1, end - at_ - 1));
    const auto is_printable = [](char c) { return c > ' ' && c < '\x7f'; };
    if (!std::ranges::all_of(value, is_printable)) fail_at();
    at_ = end + 1;
    return value;
  }
  bool boolean() {
    skip_space();
    for (const std::string_view word : {"True", "False"}) {
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return word == "True";
    }
    fail_at();
  }
  int64_t shape() {
    expect('(');
    if (accept(')')) fail("has no dimension", "one dimension");
    int64_t count = 0;
    if (peek() < '0' || peek() > '9') fail_at();
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (count > (int64_t(1) << 56)) fail_at();
      count = count * 10 + (text_[at_] - '0');
    }
    expect(',');
    if (!accept(')')) fail("has several dimensions", "one");
    return count;
  }
  TokenType type(const std::string& descr) const {
    static constexpr std::pair<std::string_view, TokenType> kTypes[] = {
        {"|u1", TokenType::u8},  {"|i1", TokenType::i8},  {"<u2", TokenType::u16},
        {"<i2", TokenType::i16}, {"<u4", TokenType::u32}, {"<i4", TokenType::i32},
        {"<i8", TokenType::i64}};
    for (const auto& [name, type] : kTypes) {
      if (descr == name) return type;
    }
    fail(fmt::format("has the type '{}'", descr),
         "little-endian integers: |u1, |i1, <u2, <i2, <u4, <i4 or <i8");
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
  std::optional<TokenType> type_;
  std::optional<bool> fortran_;
  std::optional<int64_t> count_;
};

}  // namespace

std::string name_of(TokenType type) {
  static constexpr const char* kNames[] = {"uint8",  "int8",  "uint16", "int16",
                                           "uint32", "int32", "int64"};
  return kNames[size_t(type)];
}

int64_t bytes_of(TokenType type) {
  static constexpr int64_t kBytes[] = {1, 1, 2, 2, 4, 4, 8};
  return kBytes[size_t(type)];
}

bool widen_tokens(TokenType type, std::span<const std::byte> bytes, int64_t vocab,
                  std::span<int32_t> out, StrayToken& stray) {
  switch (type) {
    case TokenType::u8:
      return widen<uint8_t>(bytes, vocab, out, stray);
    case TokenType::i8:
      return widen<int8_t>(bytes, vocab, out, stray);
    case TokenType::u16:
      return widen<uint16_t>(bytes, vocab, out, stray);
    case TokenType::i16:
      return widen<int16_t>(bytes, vocab, out, stray);
    case TokenType::u32:
      return widen<uint32_t>(bytes, vocab, out, stray);
    case TokenType::i32:
      return widen<int32_t>(bytes, vocab, out, stray);
    case TokenType::i64:
      return widen<int64_t>(bytes, vocab, out, stray);
  }
  return false;
}

std::string index_path(const std::string& path) {
  return replace_ending(path, ".idx");
}

TokenLayout read_token_layout(const std::string& path, double val_fraction) {
  TokenLayout layout;
  if (has_ending(path, ".npy")) {
    layout = read_npy_header(path);
  } else if (path_exists(index_path(path))) {
    const FileDescriptor file = open_for_reading(path);
    return read_megatron_index(index_path(path), file_size(file.get(), path), val_fraction);
  } else {
    layout = read_raw_layout(path);
  }
  layout.training_tokens = training_share(layout.tokens, val_fraction);
  return layout;
}

TokenLayout read_npy_header(const std::string& path) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  constexpr size_t kMaxHeader = 1 << 16;
  const FileDescriptor file = open_for_reading(path);
  const uint64_t bytes = file_size(file.get(), path);
  char start[12] = {};
  const size_t got = read_at(file.get(), path, start, sizeof start, 0);
  if (got < 10 || std::string_view(start, kMagic.size()) != kMagic) {
    throw IoError(fmt::format("{}: does not begin as a .npy file does", path));
  }
  const int major = uint8_t(start[6]), minor = uint8_t(start[7]);
  if (major < 1 || major > 3 || minor != 0) {
    throw IoError(
        fmt::format("{}: version {}.{} of .npy: expected 1.0, 2.0 or 3.0", path, major, minor));
  }
  const size_t begin = major == 1 ? 10 : 12;
  size_t length = 0;
  for (size_t i = begin; i-- > 8;) length = length << 8 | uint8_t(start[i]);
  if (length > kMaxHeader || begin + length > bytes) {
    throw IoError(fmt::format("{}: its header has {} bytes: expected at most {}", path, length,
                              std::min<uint64_t>(kMaxHeader, bytes < begin ? 0 : bytes - begin)));
  }
  std::string text(length, '\0');
  if (read_at(file.get(), path, text.data(), length, begin) < length) {
    throw IoError(fmt::format("{}: cut while it was read", path));
  }
  const NpyHeader header(text, path);
  TokenLayout layout;
  layout.type = header.token_type();
  layout.offset = begin + length;
  layout.tokens = header.count();
  const uint64_t expected =
      layout.offset + uint64_t(layout.tokens) * uint64_t(bytes_of(layout.type));
  if (bytes != expected) {
    throw IoError(fmt::format("{}: holds {} bytes: expected {} for {} tokens of {}", path, bytes,
                              expected, layout.tokens, name_of(layout.type)));
  }
  return layout;
}

}  // namespace tandem
