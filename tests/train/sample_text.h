// A text to train on that no change of this repository changes.
#pragma once

#include <cstdint>
#include <string>

#include "tandem/random.h"

namespace tandem {

/// 300 kB that stay the same whatever this repository's files become: sentences of 500 words, the
/// frequent ones often, each word with a few favourites to follow it.
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

}  // namespace tandem
