#include "engine/model/parameter_patterns.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr double kMaxScale = 1000;

/// Calls visit(parameter) for the parameters that match.
template <typename Visit>
void for_each_match(const char* key, const std::string& pattern, std::span<Parameter> list,
                    const Visit& visit) {
  bool found = false;
  for (Parameter& p : list) {
    if (::fnmatch(pattern.c_str(), p.name.c_str(), 0) != 0) continue;
    found = true;
    visit(p);
  }
  if (found) return;
  throw ConfigError(
      fmt::format("optimizer.{}: '{}' matches no parameter: expected a pattern of names such as {}",
                  key, printable(pattern), list.empty() ? "" : list.front().name));
}

struct Scale {
  std::string pattern;
  float factor = 1;
};

/// Parses "PATTERN=NUMBER".
Scale parse_scale(const std::string& text) {
  const size_t equals = text.rfind('=');
  double factor = -1;
  if (equals != std::string::npos) {
    const char* const end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + equals + 1, end, factor);
    if (error != std::errc() || at != end) factor = -1;
  }
  if (!(factor >= 0 && factor <= kMaxScale)) {
    throw ConfigError(
        fmt::format("optimizer.lr_scale: '{}': expected PATTERN=NUMBER with a number from 0 to {}",
                    printable(text), kMaxScale));
  }
  return {text.substr(0, equals), float(factor)};
}

}  // namespace

void apply_patterns(std::span<const std::string> no_decay, std::span<const std::string> lr_scale,
                    std::span<Parameter> list) {
  for (const std::string& pattern : no_decay) {
    for_each_match("no_decay", pattern, list, [](Parameter& p) { p.decay = false; });
  }
  std::vector<const Scale*> scale_of(list.size());
  std::vector<Scale> scales;
  for (const std::string& text : lr_scale) scales.push_back(parse_scale(text));
  for (const Scale& scale : scales) {
    for_each_match("lr_scale", scale.pattern, list, [&](Parameter& p) {
      const Scale*& earlier = scale_of[size_t(&p - list.data())];
      if (earlier) {
        throw ConfigError(fmt::format("optimizer.lr_scale: '{}' and '{}' match {}: expected one",
                                      printable(earlier->pattern), printable(scale.pattern),
                                      p.name));
      }
      earlier = &scale;
      p.lr_scale = scale.factor;
    });
  }
}

std::string to_pattern(const std::string& name, bool all_numbers) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  for (size_t i = words.size(); i-- > 0;) {
    if (words[i].empty() || words[i].find_first_not_of("0123456789") != std::string::npos) continue;
    words[i] = "*";
    if (!all_numbers) break;
  }
  return fmt::format("{}", fmt::join(words, "."));
}

}  // namespace tandem
