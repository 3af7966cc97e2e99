#include "cli/usage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

// Innermost command given.
const CLI::App& parsed_command(const CLI::App& app) {
  const auto commands = app.get_subcommands();
  return commands.empty() ? app : parsed_command(*commands.back());
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

std::string full_name(const CLI::App& command) {
  const CLI::App* parent = command.get_parent();
  return parent ? full_name(*parent) + " " + command.get_name() : "tandem";
}

/// First missing argument.
const CLI::Option* missing(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_required() && option->count() == 0) return option;
  }
  return nullptr;
}

std::string unknown_option(const CLI::App& command, const std::string& option) {
  const std::string where = full_name(command), typed = printable(option);
  const std::string close = nearest(option, option_names(command));
  return close.empty() ? fmt::format("unknown option {} (see {} --help)", typed, where)
                       : fmt::format("unknown option {}: did you mean {}? (see {} --help)", typed,
                                     close, where);
}

}  // namespace

CLI::Option* add_init_option(CLI::App& command, std::string& init) {
  return command.add_option(
      "--init", init,
      "Take the keys and the tokenizer of a model, as tandem train --init does (train.init)");
}

std::vector<const char*> expand_words(int argc, const char* const* argv) {
  std::vector<const char*> words(argv, argv + argc);
  const std::string_view first = argc > 1 ? argv[1] : "";
  const bool has_option = argc > 2 && argv[2][0] == '-';  // of the command itself
  if (first == "help" && !has_option) {
    words.erase(words.begin() + 1);
    words.push_back("--help");
  } else if (first == "version" && argc == 2) {
    words[1] = "--version";
  }
  return words;
}

std::vector<std::string> reversed_arguments(int argc, const char* const* argv) {
  const auto is_setting = [](std::string_view word) {
    const std::string_view key = word.substr(0, word.find('='));
    const auto of_name = [](char c) { return std::isalnum(uint8_t(c)) || c == '_' || c == '.'; };
    return key.size() < word.size() && key.find('.') != key.npos &&
           std::ranges::all_of(key, of_name);
  };
  std::vector<std::string> arguments;
  bool after_setting = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool first = arguments.size() > 0 && arguments.back() == "--set";
    if (after_setting && is_setting(word)) arguments.push_back("--set");
    after_setting = first || word.starts_with("--set=") || (after_setting && is_setting(word));
    arguments.push_back(word);
  }
  std::ranges::reverse(arguments);
  return arguments;
}

void check_command(const CLI::App& app, int argc, const char* const* argv) {
  const auto names = command_names(app);
  const std::string typed = argc > 1 ? argv[1] : "";
  if (typed.starts_with('-')) {
    const auto options = option_names(app);
    const std::string option = typed.substr(0, typed.find('='));
    if (std::find(options.begin(), options.end(), option) != options.end()) return;
    throw InvalidArgument(unknown_option(app, option));
  }
  if (std::find(names.begin(), names.end(), typed) != names.end()) return;
  if (typed.empty()) {
    throw InvalidArgument(
        fmt::format("no command: expected one of {} (see tandem --help)", fmt::join(names, ", ")));
  }
  const std::string close = nearest(typed, names);
  throw InvalidArgument(close.empty() ? fmt::format("unknown command '{}': expected one of {}",
                                                    printable(typed), fmt::join(names, ", "))
                                      : fmt::format("unknown command '{}': did you mean {}?",
                                                    printable(typed), close));
}

std::string one_line(std::string text) {
  constexpr size_t kMax = 2000, kEnds = kMax / 2;
  text = single_line(text);
  while (!text.empty() && text.back() == ' ') text.pop_back();
  if (text.size() <= kMax) return text;
  return fmt::format("{} ... ({} bytes) ... {}", text.substr(0, kEnds), text.size() - 2 * kEnds,
                     text.substr(text.size() - kEnds));
}

std::string explain(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = parsed_command(app);
  const std::string where = full_name(command);
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    const auto extras = app.remaining(true);
    const std::string typed = extras.empty() ? "" : extras.front();
    const std::string option = typed.substr(0, typed.find('='));
    if (!typed.starts_with('-')) {
      return fmt::format("unexpected argument '{}' (see {} --help)", printable(typed), where);
    }
    return unknown_option(command, option);
  }
  const CLI::Option* option = missing(command);
  if (option && dynamic_cast<const CLI::RequiredError*>(&error)) {
    return fmt::format("{} is missing: {} (see {} --help)", option->get_name(),
                       option->get_description(), where);
  }
  const auto subcommands = command_names(command);
  if (!subcommands.empty() && dynamic_cast<const CLI::RequiredError*>(&error)) {
    return fmt::format("{}: expected one of {} after it (see {} --help)", where,
                       fmt::join(subcommands, ", "), where);
  }
  return fmt::format("{} (see {} --help)", one_line(error.what()), where);
}

}  // namespace tandem::cli
