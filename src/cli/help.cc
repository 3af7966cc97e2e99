#include "cli/help.h"

#include <algorithm>

namespace tandem::cli {
namespace {

constexpr size_t kIndent = 30;

class Formatter : public CLI::Formatter {
 public:
  Formatter() { column_width(kIndent); }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string line = "  " + make_option_name(option, is_positional) + make_option_opts(option);
    const std::string description = make_option_desc(option);
    if (description.empty()) return line + "\n";
    if (line.size() + 1 > kIndent) line += "\n" + std::string(kIndent, ' ');
    line.resize(std::max(line.size(), kIndent), ' ');
    return line + wrapped(description, kIndent, kIndent) + "\n";
  }
};

}  // namespace

std::string wrapped(std::string_view text, size_t used, size_t indent) {
  std::string out;
  size_t column = used;
  bool first = true;  // word of the line
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    if (!first && column + 1 + word.size() > kHelpColumns) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
      first = true;
    }
    if (!first) out += ' ', ++column;
    out += word;
    column += word.size();
    first = false;
  }
  return out;
}

std::shared_ptr<CLI::FormatterBase> help_formatter() {
  return std::make_shared<Formatter>();
}

}  // namespace tandem::cli
