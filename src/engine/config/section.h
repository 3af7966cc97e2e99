// A section of a job: a table of its file. The section is a struct in config.h of the room that
// reads it; a row for each of its keys stands in the config.cc next to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

namespace tandem {

using ConfigSlot = std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                                std::vector<int64_t>*>;

/// Values that a key may have.
struct Range {
  double min = 0, max = 0;  ///< of numbers, inclusive
  std::array<std::string_view, 8> names = {};
  size_t num_names = 0;

  constexpr Range() = default;
  constexpr Range(double from, double to) : min(from), max(to) {}
  /// Strings; empty: any.
  std::span<const std::string_view> choices() const { return std::span(names).first(num_names); }
};
constexpr Range kAny;
constexpr double kBig = 1e15;  ///< max of numbers without a limit of their own

template <typename... Names>
constexpr Range one_of(const Names&... names) {
  Range range;
  range.names = {names...};
  range.num_names = sizeof...(names);
  return range;
}

/// Value of a key in its section: a member, or what a function finds.
template <class S>
using Slot =
    std::variant<int64_t S::*, double S::*, bool S::*, std::string S::*,
                 std::vector<std::string> S::*, std::vector<int64_t> S::*, ConfigSlot (*)(S&)>;

template <class S>
struct Key {
  std::string_view name;  ///< "lr"
  Slot<S> slot;
  Range range;
  std::string_view help;

  ConfigSlot value(S& section) const {
    return std::visit(
        [&](auto member) -> ConfigSlot {
          if constexpr (std::is_member_pointer_v<decltype(member)>) {
            return &(section.*member);
          } else {
            return member(section);
          }
        },
        slot);
  }
};

}  // namespace tandem
