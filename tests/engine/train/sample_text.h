// A training text that is independent of this repository's files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tandem/random.h"
#include "temp_dir.h"

namespace tandem {

/// 300 kB, constant: sentences of 500 words with skewed frequencies, each word with a few preferred
/// successors.
inline std::string sample_text() {
  const auto word = [](uint64_t number) {
    std::string text;
    const auto letters = philox(7, 1, number);
    for (uint32_t i = 0; i < 2 + letters[0] % 7; ++i) {
      text += char('a' + philox(7, 2 + i, number)[0] % 26);
    }
    return text;
  };
  std::string text;
  uint64_t last = 0;
  for (uint64_t i = 0; text.size() < 300000; ++i) {
    const auto draw = philox(7, 20, i);
    const uint64_t rare = draw[0] % 500, often = draw[1] % (rare + 1);
    last = draw[2] % 3 ? (last * 31 + draw[3] % 4 * 7 + 1) % 500 : often;
    text += word(last) + (draw[3] % 11 == 0 ? ".\n" : " ");
  }
  return text;
}

/// A folder with the beginning of sample_text(), in files of 4 kB, for the life of the process. The
/// growth of rounding differences over fifty steps depends on the text, so tests with a bound train
/// on this one.
inline const std::string& sample_folder() {
  static const TempDir dir;
  static const bool written = [] {
    constexpr size_t kFiles = 17, kBytes = 4000;
    const std::string text = sample_text();
    for (size_t i = 0; i < kFiles; ++i) {
      write_bytes(dir / (std::to_string(i) + ".txt"), text.substr(i * kBytes, kBytes));
    }
    return true;
  }();
  static_cast<void>(written);
  return dir.path();
}

/// `overrides`, plus the sample folder unless they name another text.
inline std::vector<std::string> with_sample_text(std::vector<std::string> overrides) {
  const bool has_text = std::ranges::any_of(
      overrides, [](const std::string& each) { return each.starts_with("data.paths"); });
  if (!has_text) overrides.push_back("data.paths=" + sample_folder());
  return overrides;
}

}  // namespace tandem
