#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <string_view>

#include "core/system/files.h"
#include "core/system/printable.h"
#include "fit/problem/dataset.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

class LibsvmReader {
 public:
  explicit LibsvmReader(const std::string& path) : path_(path) {}

  Dataset read(std::string_view text) {
    while (!text.empty()) {
      const size_t end = text.find('\n');
      ++line_;
      read_line(text.substr(0, end));
      text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    }
    if (data_.labels.empty()) {
      throw IoError(path_ + ": no rows: expected LIBSVM lines such as \"1 3:0.5 7:2\"");
    }
    if (data_.columns.empty()) {
      throw IoError(path_ + ": no index:value pair in any row: expected lines such as \"1 3:0.5\"");
    }
    return std::move(data_);
  }

 private:
  static constexpr std::string_view kBlanks = " \t\r\f\v";

  void read_line(std::string_view line) {
    line = line.substr(0, line.find('#'));
    std::string_view token = next_token(line);
    if (token.empty()) return;
    data_.labels.push_back(number(token, token, "a label"));
    int32_t last = 0;
    while (!(token = next_token(line)).empty()) {
      const size_t colon = token.find(':');
      if (colon == std::string_view::npos) refuse(token, "expected index:value");
      const int32_t index = to_index(token.substr(0, colon), token);
      if (index <= last) {
        refuse(token, fmt::format("expected an index above {}, that of the pair before", last));
      }
      last = index;
      data_.columns.push_back(index - 1);
      data_.values.push_back(number(token.substr(colon + 1), token, "a value"));
    }
    data_.features = std::max<int64_t>(data_.features, last);
    data_.offsets.push_back(int64_t(data_.columns.size()));
  }

  static std::string_view next_token(std::string_view& line) {
    const size_t begin = line.find_first_not_of(kBlanks);
    if (begin == std::string_view::npos) return {};
    line.remove_prefix(begin);
    const std::string_view token = line.substr(0, line.find_first_of(kBlanks));
    line.remove_prefix(token.size());
    return token;
  }

  double number(std::string_view text, std::string_view token, const char* kind) const {
    if (text.starts_with('+')) text.remove_prefix(1);
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
      refuse(token, fmt::format("expected a finite number as {}", kind));
    }
    return value;
  }

  int32_t to_index(std::string_view text, std::string_view token) const {
    int32_t index = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
    if (error != std::errc() || end != text.data() + text.size() || index < 1 ||
        index > kMaxFeatures) {
      refuse(token, fmt::format("expected an index of 1 to {}", kMaxFeatures));
    }
    return index;
  }

  [[noreturn]] void refuse(std::string_view token, const std::string& expected) const {
    constexpr size_t kShown = 40;
    throw IoError(
        fmt::format("{}:{}: \"{}\": {}", path_, line_, printable(token, kShown), expected));
  }

  const std::string path_;
  int64_t line_ = 0;
  Dataset data_;
};

}  // namespace

Dataset read_libsvm(const std::string& path) {
  return LibsvmReader(single_line(path)).read(read_file(path));
}

}  // namespace tandem::fit
