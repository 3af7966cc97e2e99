// Lines and words of a text, and the text of a value that only prints to a stream. Streams of the
// standard library take a failed allocation for the end of their text; these throw it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem {

/// Lines of a text, without their ends: `for (const std::string_view line : Lines(text))`. Views
/// are valid as long as the `Lines`.
class Lines {
 public:
  explicit Lines(std::string text) : text_(std::move(text)) {}
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  class Iterator {
   public:
    explicit Iterator(std::string_view rest) : rest_(rest) {}
    std::string_view operator*() const { return rest_.substr(0, rest_.find('\n')); }
    Iterator& operator++() {
      const size_t end = rest_.find('\n');
      rest_.remove_prefix(end == rest_.npos ? rest_.size() : end + 1);
      return *this;
    }
    bool operator==(std::default_sentinel_t) const { return rest_.empty(); }

   private:
    std::string_view rest_;
  };

  Iterator begin() const { return Iterator(text_); }
  std::default_sentinel_t end() const { return {}; }

  /// Whether `line`, one of these, is the last and has no end.
  bool is_cut(std::string_view line) const {
    return line.data() + line.size() == text_.data() + text_.size();
  }

 private:
  std::string text_;
};

/// Parts of `text` between white space.
inline std::vector<std::string> words_of(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  std::vector<std::string> words;
  for (size_t at = text.find_first_not_of(kSpace); at != text.npos;) {
    const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    words.emplace_back(text.substr(at, end - at));
    at = text.find_first_not_of(kSpace, end);
  }
  return words;
}

/// Text that `value` prints to a stream.
template <typename Value>
std::string printed(Value&& value) {
  std::ostringstream text;
  text.exceptions(std::ios_base::badbit);
  text << value;
  return std::move(text).str();
}

}  // namespace tandem
