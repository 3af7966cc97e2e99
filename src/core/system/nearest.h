// "Did you mean": the known name closest to a mistyped one.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace tandem {

/// Min number of insertions, deletions, substitutions and swaps of neighbours that turn `a` into
/// `b`.
int edit_distance(std::string_view a, std::string_view b);

/// Closest of `known` (the first of equals); empty if none is close: within a third of the longer
/// name's length, at least 1, or sharing a prefix of `typed` of at least 3 characters.
std::string nearest(std::string_view typed, std::span<const std::string> known);

}  // namespace tandem
