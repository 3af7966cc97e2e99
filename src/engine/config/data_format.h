// Formats of data, by their names in data.format.
#pragma once

#include <algorithm>
#include <array>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

struct DataFormat {
  std::string_view name;
  const char* words;  ///< in messages
  bool has_text;      ///< of which bytes are counted, and prompts are
  bool has_chats;     ///< read with a chat template
};
inline constexpr DataFormat kDataFormats[] = {{"text", "text", true, false},
                                              {"jsonl", "JSON Lines", true, false},
                                              {"chat", "chats", false, true},
                                              {"tokens", "tokens", false, false}};

/// The format of this name; nullptr for "auto".
constexpr const DataFormat* find_data_format(std::string_view name) {
  const auto found = std::ranges::find(kDataFormats, name, &DataFormat::name);
  return found == std::end(kDataFormats) ? nullptr : &*found;
}
constexpr bool has_chats(std::string_view format) {
  const DataFormat* found = find_data_format(format);
  return found && found->has_chats;
}
constexpr bool has_text(std::string_view format) {
  const DataFormat* found = find_data_format(format);
  return found && found->has_text;
}

/// Values of data.format.
inline constexpr auto kDataFormatNames = [] {
  std::array<std::string_view, 1 + std::size(kDataFormats)> names{"auto"};
  std::ranges::transform(kDataFormats, names.begin() + 1, &DataFormat::name);
  return names;
}();
inline std::vector<std::string> data_format_names() {
  return {kDataFormatNames.begin(), kDataFormatNames.end()};
}

}  // namespace tandem
