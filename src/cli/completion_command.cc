#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace tandem::cli {
namespace {

/// The words typed so far choose a command; what it takes is offered, and files where nothing fits.
constexpr const char* kBashCompletion = R"(_tandem() {{
  local path= words= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
{}      path="$path $word" ;;
    esac
  done
  case $path in
{}  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _tandem tandem
)";
constexpr const char* kZshCompletion = "autoload -U +X bashcompinit && bashcompinit\n";

/// Appends "path) words" of the command and of those in it, and their paths.
void collect_completion(const CLI::App& command, const std::string& path, std::string& cases,
                        std::vector<std::string>& paths) {
  std::vector<std::string> words;
  for (const CLI::App* inner : command.get_subcommands([](const CLI::App*) { return true; })) {
    words.push_back(inner->get_name());
  }
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) words.push_back("--" + name);
  }
  cases += fmt::format("    '{}') words='{}' ;;\n", path, fmt::join(words, " "));
  for (const CLI::App* inner : command.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string path_of_inner = path + " " + inner->get_name();
    paths.push_back(path_of_inner);
    collect_completion(*inner, path_of_inner, cases, paths);
  }
}

void print_completion(const CLI::App& app, const std::string& shell) {
  std::string cases;
  std::vector<std::string> paths;
  collect_completion(app, "", cases, paths);
  fmt::print("{}", shell == "zsh" ? kZshCompletion : "");
  fmt::print(kBashCompletion, fmt::format("      '{}')\n", fmt::join(paths, "' | '")), cases);
}

}  // namespace

void add_completion(CLI::App& app) {
  auto* command = app.add_subcommand("completion", "Print the completion of commands for a shell");
  auto shell = std::make_shared<std::string>();
  command->add_option("shell", *shell, "bash or zsh")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}));
  command->footer(R"(
Examples:
  source <(tandem completion bash)                      in this shell
  tandem completion bash >>~/.bash_completion           in later ones)");
  command->callback([&app, shell] { print_completion(app, *shell); });
}

}  // namespace tandem::cli
