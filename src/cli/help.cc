#include "cli/help.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <utility>

namespace tandem::cli {
namespace {

constexpr size_t kIndent = 30;
/// Limits above this exist to refuse typing errors, and are not shown.
constexpr double kMaxShownLimit = 999;

/// Values of options that are texts without choices, by option: the same in all commands.
struct ShownValue {
  std::string_view value;
  std::initializer_list<const char*> options;
};
constexpr ShownValue kValues[] = {
    {"FILE",
     {"json", "csv", "svg", "timeline", "list", "hosts", "inject", "fit", "predict", "hardware",
      "page", "prompts", "chat", "merge"}},
    {"FOLDER", {"out", "init", "chakra"}},
    {"[HOST:]PORT", {"port", "live"}},
    {"FORMAT", {"codec", "formats"}},
    {"FORMAT|PERCENT", {"accuracy"}},
    {"PERCENT", {"budget"}},
    {"NAME", {"name", "schedule"}},
    {"CONDITIONS", {"where", "fit-where"}},
    {"COLUMN", {"leave-out"}},
    {"PATH", {"data", "val"}},
    {"PREFIX", {"codec-sweep"}},
    {"SITE", {"sweep-sites"}},
    {"KEY", {"text-key"}},
    {"KEY=VALUE", {"set"}},
    {"RATE,LATENCY", {"link"}},
    {"COMMAND", {"remote-shell"}},
    {"FIRST[:LAST]", {"steps"}},
};

/// Type of a value and its check, which CLI11 has as one text, "INT:INT in [1 - 16]".
std::pair<std::string, std::string> type_of(const CLI::Option& option) {
  const std::string text = option.get_type_name();
  const size_t colon = text.find(':');
  if (colon == text.npos) return {text, ""};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

}  // namespace

std::string value_of(const CLI::Option& option) {
  if (!option.get_option_text().empty()) return option.get_option_text();
  if (option.get_items_expected_max() == 0) return "";
  const auto [type, check] = type_of(option);
  std::string value = "TEXT";
  if (check.starts_with('{')) {
    value = check.substr(1, check.find('}') - 1);
    std::ranges::replace(value, ',', '|');
  } else if (type == "INT" || type == "UINT" || check.starts_with("INT")) {
    value = "N";
  } else if (type == "FLOAT") {
    value = "X";
  } else {
    for (const ShownValue& shown : kValues) {
      if (std::ranges::any_of(shown.options, [&](const char* o) { return option.check_lname(o); }))
        value = shown.value;
    }
  }
  if (option.get_expected_min() == 3) return value + "," + value + "," + value;
  return value + (option.get_expected_max() > 1 ? " ..." : "");
}

namespace {

/// "2 to 64", unless a limit only refuses typing errors or the description explains the lowest.
std::string range_of(const CLI::Option& option) {
  const std::string check = type_of(option).second;
  const size_t open = check.find('['), dash = check.find(" - ");
  if (open == check.npos || dash == check.npos || check.starts_with('{') ||
      option.get_description().find("(0:") != std::string::npos)
    return "";
  const std::string low = check.substr(open + 1, dash - open - 1),
                    high = check.substr(dash + 3, check.find(']') - dash - 3);
  return std::strtod(high.c_str(), nullptr) > kMaxShownLimit ? "" : low + " to " + high;
}

/// The default, unless the description has it.
std::string default_of(const CLI::Option& option) {
  std::string value = option.get_default_str();
  if (option.get_description().find("default: ") != std::string::npos) return "";
  if (value.starts_with('['))
    value = CLI::detail::find_and_replace(value.substr(1, value.size() - 2), ",", ", ");
  return value.empty() ? "" : "default: " + value;
}

/// The description, with its range, default and whether it is required in its last parentheses.
std::string describe(const CLI::Option& option, bool is_positional) {
  std::string text = option.get_description();
  const bool is_required = option.get_required() && !is_positional;
  for (const std::string& note :
       {range_of(option), default_of(option), std::string(is_required ? "required" : "")}) {
    if (note.empty()) continue;
    const bool extends = text.ends_with(')');
    if (extends) text.pop_back();
    text += (extends ? "; " : " (") + note + ")";
  }
  return text;
}

class Formatter : public CLI::Formatter {
 public:
  Formatter() {
    column_width(kIndent);
    label("Positionals", "Arguments");
  }

  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    return CLI::detail::find_and_replace(CLI::Formatter::make_help(app, std::move(name), mode),
                                         "\n\n\n", "\n\n");
  }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    std::string line = "  " + name_of(*option, is_positional);
    if (const std::string value = value_of(*option); !is_positional && !value.empty())
      line += " " + value;
    const std::string description = describe(*option, is_positional);
    if (description.empty()) return line + "\n";
    if (line.size() + 1 > kIndent) line += "\n" + std::string(kIndent, ' ');
    line.resize(std::max(line.size(), kIndent), ' ');
    return line + wrapped(description, kIndent, kIndent) + "\n";
  }

 private:
  /// "-n, --ranks", without what CLI11 adds to the name of a flag that clears.
  static std::string name_of(const CLI::Option& option, bool is_positional) {
    std::string name;
    for (const char c : option.get_name(is_positional, true)) {
      if (c == '{') break;
      name += c == ',' ? std::string(", ") : std::string(1, c);
    }
    return name;
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
