#include "engine/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "core/system/files.h"
#include "core/system/lines.h"
#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "engine/config/config_paths.h"
#include "engine/model/codec_policy.h"
#include "tandem/error.h"

namespace tandem {
namespace {

/// Location of a value: "file:line" or "--set".
struct Location {
  std::string file;
  bool override_ = false;
  std::vector<std::string>* notes = nullptr;
  std::string at(const toml::node& node) const {
    return override_ ? file : fmt::format("{}:{}", file, node.source().begin.line);
  }
};

std::string shown(const toml::node& node) {
  if (const auto* value = node.as_string()) return printable(fmt::format("\"{}\"", value->get()));
  if (const auto* whole = node.as_integer()) return fmt::format("{}", whole->get());
  if (const auto* real = node.as_floating_point()) return fmt::format("{}", real->get());
  if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
  return "of type " + printed(node.type());
}

struct Assign {
  const ConfigKey& key;
  const toml::node& node;
  const Location& location;

  [[noreturn]] void wrong(const std::string& expected) const {
    throw ConfigError(fmt::format("{}: {} is {}: expected {}", location.at(node), key.name,
                                  shown(node), expected));
  }
  void operator()(int64_t* slot) const {
    const auto value =
        node.is_number() ? node.value<double>() : std::nullopt;  // 1e3 counts as an integer
    if (!value || !(*value >= key.range.min && *value <= key.range.max) ||
        *value != std::floor(*value)) {
      wrong(fmt::format("an integer from {:.0f} to {:.0f}", key.range.min, key.range.max));
    }
    *slot = node.is_integer() ? node.as_integer()->get() : int64_t(*value);
  }
  void operator()(double* slot) const {
    const auto value = node.is_number() ? node.value<double>() : std::nullopt;
    if (!value || !(*value >= key.range.min && *value <= key.range.max)) {
      wrong(fmt::format("a number from {:.7g} to {:.7g}", key.range.min, key.range.max));
    };
    *slot = *value;
  }
  void operator()(bool* slot) const {
    const auto* value = node.as_boolean();
    if (!value) wrong("true or false");
    *slot = value->get();
  }
  void operator()(std::string* slot) const {
    if (key.name == "parallel.codec" && node.is_table()) return assign_sites(slot);
    const auto* value = node.as_string();
    const auto choices = key.range.choices();
    if (!value || (!choices.empty() &&
                   std::find(choices.begin(), choices.end(), value->get()) == choices.end())) {
      wrong(choices.empty() ? "a string"
                            : fmt::format("one of \"{}\"", fmt::join(choices, "\", \"")));
    }
    *slot = value->get();
  }
  void operator()(std::vector<std::string>* slot) const {
    slot->clear();
    if (key.name == "optimizer.lr_scale" && node.is_table()) return assign_scales(slot);
    if (const auto* one = node.as_string()) slot->push_back(one->get());
    const auto* many = node.as_array();
    if (!many && slot->empty()) wrong("a string or an array of strings");
    if (!many) return;
    for (const toml::node& entry : *many) {
      if (!entry.is_string()) wrong("a string or an array of strings");
      slot->push_back(entry.as_string()->get());
    }
  }
  /// Converts {"*norm*" = 0.5} to "*norm*=0.5".
  void assign_scales(std::vector<std::string>* slot) const {
    for (const auto& [pattern, scale] : *node.as_table()) {
      if (!scale.is_number()) {
        throw ConfigError(fmt::format("{}: {}: '{}' is {}: expected a number", location.at(scale),
                                      key.name, printable(pattern.str()), shown(scale)));
      }
      slot->push_back(fmt::format("{}={}", pattern.str(), *scale.value<double>()));
    }
  }
  void operator()(std::vector<int64_t>* slot) const {
    slot->clear();
    const auto* many = node.as_array();
    const auto expected =
        fmt::format("an array of integers from {:.0f} to {:.0f}", key.range.min, key.range.max);
    if (!many) wrong(expected);
    for (const toml::node& entry : *many) {
      const auto* value = entry.as_integer();
      if (!value || double(value->get()) < key.range.min || double(value->get()) > key.range.max) {
        wrong(expected);
      }
      slot->push_back(value->get());
    }
  }
  /// Converts {mlp = "int4:g32"} to the text of a CodecPolicy, "mlp=int4:g32".
  void assign_sites(std::string* slot) const {
    std::string text;
    for (const auto& [site, codec] : *node.as_table()) {
      if (!codec.is_string()) {
        throw ConfigError(fmt::format("{}: {}.{} is {}: expected a string, such as \"int8\"",
                                      location.at(codec), key.name, printable(site.str()),
                                      shown(codec)));
      }
      const std::string one = fmt::format("{}={}", site.str(), codec.as_string()->get());
      try {
        if (std::ranges::count(one, '=') > 1 || one.find(',') != one.npos) {
          throw InvalidArgument(fmt::format("'{}': expected one site and one codec", one));
        }
        CodecPolicy::parse(one);
      } catch (const InvalidArgument& error) {
        throw ConfigError(
            fmt::format("{}: {}: {}", location.at(codec), key.name, printable(error.what(), 300)));
      }
      text += (text.empty() ? "" : ",") + one;
    }
    *slot = text.empty() ? "none" : text;
  }
};

/// Suggests a key with the same last part in another table, else the nearest in the same table,
/// else the nearest of all.
std::string suggestion(const std::string& name, bool is_table) {
  const size_t dot = name.find('.');
  const std::string table = name.substr(0, dot);
  const std::string leaf = dot == std::string::npos ? name : name.substr(dot + 1);
  std::vector<std::string> siblings, all;
  for (const ConfigKey& key : config_keys()) {
    const size_t at = key.name.find('.');
    if (!is_table && key.name.substr(at + 1) == leaf) return key.name;
    if (key.name.substr(0, at) == table) siblings.push_back(key.name.substr(at + 1));
    all.push_back(is_table ? key.name.substr(0, at) : key.name);
  }
  const std::string close = is_table ? "" : nearest(leaf, siblings);
  return close.empty() ? nearest(name, all) : table + "." + close;
}

void apply(TrainConfig& config, const std::string& given, const toml::node& node,
           const Location& location) {
  const std::string_view current = current_name(given);
  const std::string name(current.empty() ? given : current);
  if (!current.empty()) {
    const std::string note = fmt::format("{}: {} is now called {}", location.at(node), given, name);
    if (location.notes) location.notes->push_back(note);
  }
  const auto keys = config_keys();
  const auto key =
      std::find_if(keys.begin(), keys.end(), [&](const auto& k) { return k.name == name; });
  if (key != keys.end()) {
    std::visit(Assign{*key, node, location}, key->slot(config));
    return;
  }
  const bool is_table = std::any_of(keys.begin(), keys.end(),
                                    [&](const auto& k) { return k.name.starts_with(name + "."); });
  // In an unknown table within another its keys are named, which suggest known ones.
  const bool is_inner = name.find('.') != std::string::npos;
  if ((is_table || is_inner) && node.is_table() && !node.as_table()->empty()) {
    for (const auto& [child, value] : *node.as_table()) {
      apply(config, name + "." + std::string(child.str()), value, location);
    }
    return;
  }
  if (is_table && node.is_table()) return;
  if (is_table) {
    throw ConfigError(
        fmt::format("{}: {} is {}: expected a table", location.at(node), name, shown(node)));
  }
  const std::string close = suggestion(name, node.is_table());
  throw ConfigError(fmt::format("{}: unknown key '{}'{}", location.at(node), printable(name),
                                close.empty() ? ": `tandem train --help keys` lists the keys"
                                              : fmt::format(": did you mean '{}'?", close)));
}

/// Index of the first non-ASCII byte outside strings and comments, or npos. TOML allows none there,
/// and toml++ 3.3 runs into undefined behaviour on some.
size_t stray_character(std::string_view text) {
  const auto starts = [&](size_t at, std::string_view what) {
    return text.substr(at, what.size()) == what;
  };
  std::string_view closing;  // terminator of the current string or comment; empty: none
  for (size_t i = text.size() - without_bom(text).size(); i < text.size(); ++i) {
    if (!closing.empty()) {
      const bool escapes = closing[0] == '"';
      if (escapes && text[i] == '\\') {
        ++i;
      } else if (starts(i, closing)) {
        i += closing.size() - 1;
        closing = {};
      } else if (text[i] == '\n' && closing.size() == 1) {
        closing = {};  // a single-line string ends at the newline, even if unterminated
      }
      continue;
    }
    if ((text[i] & 0x80) != 0) return i;
    if (text[i] == '#') closing = "\n";
    for (const std::string_view quote : {"\"\"\"", "'''", "\"", "'"}) {
      if (closing.empty() && starts(i, quote)) {
        closing = quote;
        i += quote.size() - 1;
      }
    }
  }
  return std::string_view::npos;
}

/// TOML of the table that a parser reads back: of strings on several lines it drops the first line
/// break, and literal ones may have none.
std::string text_of(const toml::table& table) {
  using toml::format_flags;
  const format_flags flags =
      toml::toml_formatter::default_flags & ~format_flags::allow_multi_line_strings;
  const std::string text = printed(toml::toml_formatter(table, flags));
  try {
    if (toml::parse(text) == table) return text;
  } catch (const toml::parse_error&) {
  }
  return printed(toml::toml_formatter(table, flags & ~format_flags::allow_literal_strings));
}

bool survives_printing(const toml::table& table) {
  try {
    return toml::parse(text_of(table)) == table;
  } catch (const toml::parse_error&) {
    return false;
  }
}

void apply_override(TrainConfig& config, const std::string& text, std::vector<std::string>* notes) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) {
    throw ConfigError(fmt::format("--set {}: expected table.key=value", printable(text)));
  }
  const std::string name = text.substr(0, equals), value = text.substr(equals + 1);
  const Location location{"--set " + printable(text), true, notes};
  toml::table parsed;
  try {
    // Non-ASCII text is parsed only if it is a string or a list from its first character: text
    // before a quote leads toml++ 3.3 into undefined behaviour.
    const bool ascii = std::all_of(value.begin(), value.end(), [](char c) { return c >= 0; });
    const bool quoted =
        !value.empty() && std::string_view("\"'[").find(value[0]) != std::string::npos;
    if (ascii || (quoted && stray_character(value) == std::string::npos)) {
      parsed = toml::parse("value = " + value + "\n");
    }
  } catch (const toml::parse_error&) {
  }
  // Bare words (bf16) and input with more than one value are treated as strings.
  if (parsed.size() != 1) {
    parsed = toml::table{{"value", value}};
    if (!survives_printing(parsed)) {
      throw ConfigError(fmt::format("--set {}: the value is not UTF-8 text", printable(name)));
    }
  }
  apply(config, name, *parsed.get("value"), location);
}

/// A file that has a key by both of its names does not say which value counts.
void check_names(const toml::table& root, const std::string& file) {
  for (const auto& [old, name] : renamed_keys()) {
    const auto before = root.at_path(old), now = root.at_path(name);
    if (!before || !now) continue;
    throw ConfigError(fmt::format("{}: {} is now called {}, which line {} has, too: expected one",
                                  Location{file}.at(*before.node()), old, name,
                                  now.node()->source().begin.line));
  }
}

/// The keys of a job that `is_written` accepts, as TOML.
std::string toml_of(TrainConfig config, const std::function<bool(const ConfigKey&)>& is_written) {
  toml::table root;
  for (const ConfigKey& key : config_keys()) {
    if (!is_written(key)) continue;
    std::string name = key.name;
    toml::table* table = &root;
    for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.')) {
      const std::string outer = name.substr(0, dot);
      if (!table->contains(outer)) table->insert(outer, toml::table{});
      table = table->get_as<toml::table>(outer);
      name.erase(0, dot + 1);
    }
    toml::table& section = *table;
    std::visit(
        [&](auto* value) {
          if constexpr (std::is_same_v<decltype(value), std::vector<std::string>*> ||
                        std::is_same_v<decltype(value), std::vector<int64_t>*>) {
            toml::array entries;
            for (const auto& entry : *value) entries.push_back(entry);
            section.insert(name, entries);
          } else {
            section.insert(name, *value);
          }
        },
        key.slot(config));
  }
  return text_of(root) + "\n";
}

}  // namespace

void make_paths_relative_to(TrainConfig& config, const std::string& folder) {
  for (auto* paths : {&config.data.paths, &config.data.val_paths}) {
    for (std::string& path : *paths) path = make_relative_to(path, folder);
  }
  for (std::string* path : {&config.data.manifest, &config.data.tokenizer, &config.train.init}) {
    if (!path->empty()) *path = make_relative_to(*path, folder);
  }
}

TrainConfig parse_config(const std::string& text, const std::string& file,
                         std::span<const std::string> overrides, std::vector<std::string>* notes,
                         TrainConfig config) {
  if (const size_t at = stray_character(text); at != std::string::npos) {
    throw ConfigError(fmt::format(
        "{}:{}: not valid TOML: a character past ASCII (byte 0x{:02x}) "
        "outside strings and comments",
        file, 1 + std::count(text.begin(), text.begin() + at, '\n'), uint8_t(text[at])));
  }
  try {
    const toml::table root = toml::parse(std::string_view(text), file);
    check_names(root, file);
    for (const auto& [name, node] : root) {
      apply(config, std::string(name.str()), node, Location{file, false, notes});
    }
  } catch (const toml::parse_error& error) {
    throw ConfigError(fmt::format("{}:{}: not valid TOML: {}", file, error.source().begin.line,
                                  printable(error.description(), 300)));
  }
  make_paths_relative_to(config, std::filesystem::path(file).parent_path().string());
  for (const std::string& override_ : overrides) apply_override(config, override_, notes);
  return config;
}

TrainConfig load_config(const std::string& file, std::span<const std::string> overrides,
                        std::vector<std::string>* notes) {
  return parse_config(read_file(file, Source::any), file, overrides, notes);
}

std::string TrainConfig::to_toml() const {
  return toml_of(*this, [](const ConfigKey&) { return true; });
}

std::string TrainConfig::to_toml(std::span<const KeyDifference> written) const {
  std::set<std::string> names;
  for (const KeyDifference& each : written) names.insert(each.key);
  return toml_of(*this, [&](const ConfigKey& key) { return names.contains(key.name); });
}

}  // namespace tandem
