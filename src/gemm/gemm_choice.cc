#include "gemm/gemm_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

namespace tandem {
namespace {

std::optional<uint64_t> take_word(std::string_view& text) {
  uint64_t word = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), word, 16);
  if (code != std::errc()) return std::nullopt;
  text.remove_prefix(size_t(end - text.data()));
  if (!text.empty() && text.front() != ' ') return std::nullopt;
  if (!text.empty()) text.remove_prefix(1);
  return word;
}

}  // namespace

std::string text_of(const GemmChoice& choice) {
  std::string text;
  for (const uint64_t word : choice.algorithm) text += fmt::format("{:x} ", word);
  return text + fmt::format("{:x}", choice.workspace);
}

std::optional<GemmChoice> gemm_choice_in(std::string_view text) {
  GemmChoice choice;
  for (uint64_t& word : choice.algorithm) {
    const auto taken = take_word(text);
    if (!taken) return std::nullopt;
    word = *taken;
  }
  const auto workspace = take_word(text);
  if (!workspace || !text.empty()) return std::nullopt;
  choice.workspace = *workspace;
  return choice;
}

std::string text_of(const GemmChoices& choices) {
  std::string text;
  for (const auto& [key, choice] : choices) text += fmt::format("{}\t{}\n", key, text_of(choice));
  return text;
}

GemmChoices gemm_choices_in(std::string_view text) {
  GemmChoices choices;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const size_t tab = line.find('\t');
    if (tab == line.npos) continue;
    if (const auto choice = gemm_choice_in(line.substr(tab + 1))) {
      choices.emplace(line.substr(0, tab), *choice);
    }
  }
  return choices;
}

GemmChoices agreed_choices(std::span<const GemmChoices> by_rank) {
  GemmChoices agreed;
  for (const GemmChoices& of_rank : by_rank) agreed.insert(of_rank.begin(), of_rank.end());
  return agreed;
}

}  // namespace tandem
