// Which of a GPU library's algorithms a product takes. It is chosen by timing, and decides on the
// bits of the result: so it is kept, and the same on all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// By the attributes that the library documents, which tell an algorithm from the others that the
/// same version suggests on the same GPU.
struct GemmChoice {
  std::array<uint64_t, 8> algorithm{};
  uint64_t workspace = 0;  ///< bytes
  bool operator==(const GemmChoice&) const = default;
};

/// Nine hexadecimal words.
std::string text_of(const GemmChoice& choice);
/// Nothing where the text is none.
std::optional<GemmChoice> gemm_choice_in(std::string_view text);

/// By key, which names the library's version, the GPU and the product; no line breaks.
using GemmChoices = std::map<std::string, GemmChoice>;

/// A line each. What is no choice is left out when it is read.
std::string text_of(const GemmChoices& choices);
GemmChoices gemm_choices_in(std::string_view text);

/// What all ranks take: of each key the choice of the lowest rank that has one.
GemmChoices agreed_choices(std::span<const GemmChoices> by_rank);

}  // namespace tandem
