#include "engine/chat/jinja/syntax/jinja_lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

#include "core/system/printable.h"
#include "engine/chat/jinja/jinja_value.h"

namespace tandem::jinja {
namespace {

constexpr std::string_view kOperators[] = {"**", "//", "==", "!=", ">=", "<=", "+", "-", "*",
                                           "/",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                           ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};

bool is_blank(char c) {
  return std::isspace(static_cast<unsigned char>(c)) != 0;
}
bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
}

class Lexer {
 public:
  explicit Lexer(std::string source) : source_(std::move(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      read_text();
      if (at_ < source_.size()) read_tag();
    }
    add(Token::Type::end, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail(fmt::format("line {}: {}", line_, what));
  }
  void add(Token::Type type, std::string text) {
    tokens_.push_back({type, std::move(text), line_});
  }
  bool has(std::string_view text) const {
    return std::string_view(source_).substr(at_).starts_with(text);
  }
  void advance(size_t count) {
    for (size_t i = 0; i < count && at_ < source_.size(); ++i) line_ += source_[at_++] == '\n';
  }

  /// Text up to the next tag.
  void read_text() {
    size_t tag = at_;
    const auto begins_tag = [&](size_t i) {
      return source_[i] == '{' && i + 1 < source_.size() &&
             (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#');
    };
    while (tag < source_.size() && !begins_tag(tag)) ++tag;
    std::string text = source_.substr(at_, tag - at_);
    if (tag < source_.size()) strip_before(text, source_[tag + 1], tag + 2);
    if (!text.empty()) add(Token::Type::text, text);
    advance(tag - at_);
  }

  /// Strips white space before a tag. `sign`: position of its minus or plus, if any.
  void strip_before(std::string& text, char kind, size_t sign) const {
    const char next = sign < source_.size() ? source_[sign] : ' ';
    if (next == '-') {
      while (!text.empty() && is_blank(text.back())) text.pop_back();
    } else if (next != '+' && kind != '{') {
      const size_t line = text.rfind('\n') + 1;  // 0 if there is none
      const bool is_blank_line = std::all_of(text.begin() + int64_t(line), text.end(), is_blank);
      if ((line > 0 || begins_line_) && is_blank_line) text.resize(line);
    }
  }

  void read_tag() {
    const char kind = source_[at_ + 1];
    advance(2);
    if (has("-") || has("+")) advance(1);
    if (kind == '#') return read_comment();
    if (kind == '%' && read_raw()) return;
    add(kind == '{' ? Token::Type::output_begin : Token::Type::block_begin, "");
    int depth = 0;
    while (true) {
      while (at_ < source_.size() && is_blank(source_[at_])) advance(1);
      if (at_ >= source_.size()) refuse("the template ends in a tag");
      if (depth == 0 && ends_tag(kind == '{' ? "}}" : "%}")) break;
      read_token(depth);
    }
    add(kind == '{' ? Token::Type::output_end : Token::Type::block_end, "");
    end_tag(kind == '{' ? "}}" : "%}");
  }

  /// Reads a block whose text has no tags, if one begins.
  bool read_raw() {
    const auto blank = [&](size_t at) {
      while (at < source_.size() && is_blank(source_[at])) ++at;
      return at;
    };
    size_t at = blank(at_);
    if (source_.compare(at, 3, "raw") != 0) return false;
    at = blank(at + 3);
    const size_t sign = at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? 1 : 0;
    if (source_.compare(at + sign, 2, "%}") != 0) return false;
    advance(at - at_);
    end_tag("%}");
    for (size_t end = at_; (end = source_.find("{%", end)) != std::string::npos; end += 2) {
      size_t name = end + 2;
      if (name < source_.size() && (source_[name] == '-' || source_[name] == '+')) ++name;
      name = blank(name);
      if (source_.compare(name, 6, "endraw") != 0) continue;
      std::string text = source_.substr(at_, end - at_);
      strip_before(text, '%', end + 2);
      if (!text.empty()) add(Token::Type::text, text);
      advance(blank(name + 6) - at_);
      if (!ends_tag("%}")) refuse("expected the end of the tag endraw");
      end_tag("%}");
      return true;
    }
    refuse("the template ends in a raw block");
  }

  bool ends_tag(std::string_view end) const {
    return has(end) || has("-" + std::string(end)) || has("+" + std::string(end));
  }
  /// Skips the end of a tag and the white space that it strips.
  void end_tag(std::string_view end) {
    const size_t begin = at_;
    const bool strips = has("-"), retains = has("+");
    advance(end.size() + (strips || retains ? 1 : 0));
    if (strips) {
      while (at_ < source_.size() && is_blank(source_[at_])) advance(1);
    } else if (!retains && end != "}}" && has("\n")) {
      advance(1);
    }
    begins_line_ = at_ > begin && source_[at_ - 1] == '\n';
  }

  void read_comment() {
    while (at_ < source_.size() && !ends_tag("#}")) advance(1);
    if (at_ >= source_.size()) refuse("the template ends in a comment");
    end_tag("#}");
  }

  void read_token(int& depth) {
    const char c = source_[at_];
    if (c == '\'' || c == '"') return read_string(c);
    if (std::isdigit(static_cast<unsigned char>(c)) != 0) return read_number();
    if (is_word(c)) {
      size_t end = at_;
      while (end < source_.size() && is_word(source_[end])) ++end;
      add(Token::Type::name, source_.substr(at_, end - at_));
      return advance(end - at_);
    }
    const auto* found =
        std::ranges::find_if(kOperators, [&](std::string_view each) { return has(each); });
    if (found == std::end(kOperators)) {
      refuse(fmt::format("unexpected '{}'", printable(std::string(1, c))));
    }
    if (c == '(' || c == '[' || c == '{') ++depth;
    if (c == ')' || c == ']' || c == '}') --depth;
    add(Token::Type::op, std::string(*found));
    advance(found->size());
  }

  void read_number() {
    size_t end = at_;
    const auto digits = [&] {
      while (end < source_.size() &&
             (std::isdigit(static_cast<unsigned char>(source_[end])) != 0 || source_[end] == '_'))
        ++end;
    };
    digits();
    bool is_real = false;
    if (end + 1 < source_.size() && source_[end] == '.' &&
        std::isdigit(static_cast<unsigned char>(source_[end + 1])) != 0) {
      is_real = true;
      ++end;
      digits();
    }
    if (const size_t exponent = exponent_bytes(end); exponent > 0) {
      is_real = true;
      end += exponent;
      digits();
    }
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    if (text.size() > 18) refuse("number of more than 18 digits");
    add(is_real ? Token::Type::real : Token::Type::integer, text);
    advance(end - at_);
  }

  /// Bytes of "e", perhaps a sign, before a digit.
  size_t exponent_bytes(size_t at) const {
    if (at >= source_.size() || (source_[at] != 'e' && source_[at] != 'E')) return 0;
    const size_t bytes = at + 1 < source_.size() && std::strchr("+-", source_[at + 1]) ? 2 : 1;
    const bool has_digit = at + bytes < source_.size() &&
                           std::isdigit(static_cast<unsigned char>(source_[at + bytes])) != 0;
    return has_digit ? bytes : 0;
  }

  void read_string(char quote) {
    std::string text;
    advance(1);
    while (at_ < source_.size() && source_[at_] != quote) {
      if (source_[at_] != '\\') {
        text += source_[at_];
        advance(1);
        continue;
      }
      if (at_ + 1 >= source_.size()) break;
      const char c = source_[at_ + 1];
      advance(2);
      constexpr std::string_view kEscapes = "nrt\\'\"abfv", kMeanings = "\n\r\t\\'\"\a\b\f\v";
      const size_t escape = kEscapes.find(c);
      if (escape != std::string_view::npos) {
        text += kMeanings[escape];
      } else if (c == 'u' || c == 'x') {
        text += read_code_point(c == 'u' ? 4 : 2);
      } else if (c == 'U' || c == 'N' || (c >= '0' && c <= '7')) {
        refuse(fmt::format("escape '\\{}' in a string", c));
      } else if (c != '\n') {
        text += {'\\', c};
      }
    }
    if (at_ >= source_.size()) refuse("the template ends in a string");
    advance(1);
    add(Token::Type::string, text);
  }

  /// Hexadecimal digits as UTF-8.
  std::string read_code_point(size_t count) {
    const std::string digits = source_.substr(at_, count);
    const auto is_hex = [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; };
    if (digits.size() != count || !std::ranges::all_of(digits, is_hex)) {
      refuse(fmt::format("escape '\\{}' without {} digits", count == 4 ? 'u' : 'x', count));
    }
    advance(count);
    const std::string zeros(4 - count, '0');
    const Json parsed = Json::parse("\"\\u" + zeros + digits + "\"", nullptr, false);
    if (!parsed.is_string()) refuse("escape '\\u' of half a surrogate pair");
    return parsed.get<std::string>();
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool begins_line_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
    } else if (i + 1 >= source.size() || source[i + 1] != '\n') {
      text += '\n';
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return Lexer(std::move(text)).run();
}

}  // namespace tandem::jinja
