// The algorithm of a GPU library that a GEMM runs. It is chosen by timing and determines the bits
// of the result, so it is saved, and it is the same on all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// Attributes that the library documents, which identify an algorithm among those that the same
/// version suggests on the same GPU.
struct GemmChoice {
  std::array<uint64_t, 8> algorithm{};
  uint64_t workspace = 0;  ///< bytes
  bool operator==(const GemmChoice&) const = default;
};

/// Formats as nine hexadecimal words.
std::string text_of(const GemmChoice& choice);
/// Parses that format; nullopt if the text is malformed.
std::optional<GemmChoice> gemm_choice_in(std::string_view text);

/// Map from a key (library version, GPU and GEMM; no line breaks) to the choice.
using GemmChoices = std::map<std::string, GemmChoice>;

/// One line per choice. Malformed lines are skipped on reading.
std::string text_of(const GemmChoices& choices);
GemmChoices gemm_choices_in(std::string_view text);

/// Choices for all ranks: for each key that of the lowest rank that has one.
GemmChoices agreed_choices(std::span<const GemmChoices> by_rank);

}  // namespace tandem
