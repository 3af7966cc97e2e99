#include "fit/options.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>

#include "core/system/printable.h"
#include "tandem/error.h"

namespace tandem::fit {
namespace {

template <typename T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Failure Failure::parse(const std::string& text) {
  const std::string_view all = text;
  const size_t at = all.find('@'), dash = all.find('-', at == all.npos ? 0 : at);
  const auto client = parse_number<int>(all.substr(0, at));
  std::optional<int64_t> first, last = std::numeric_limits<int64_t>::max();
  if (at != all.npos) first = parse_number<int64_t>(all.substr(at + 1, dash - at - 1));
  if (dash != all.npos) last = parse_number<int64_t>(all.substr(dash + 1));
  if (!client || *client < 0 || !first || *first < 1 || !last || *last < *first) {
    throw InvalidArgument(fmt::format(
        "--fail {}: expected CLIENT@ROUND or CLIENT@FIRST-LAST, such as 3@10-20", printable(text)));
  }
  return {*client, *first, *last};
}

L2 L2::parse(const std::string& text) {
  constexpr std::string_view kAuto = "auto:kappa=";
  const std::string_view all = text;
  const bool is_auto = all.starts_with(kAuto);
  const auto value = parse_number<double>(is_auto ? all.substr(kAuto.size()) : all);
  if (!value || !std::isfinite(*value) || *value < 0 || (is_auto && *value <= 1)) {
    throw InvalidArgument(fmt::format(
        "--l2 {}: expected a number that is not negative, or auto:kappa=K with K above 1",
        printable(text)));
  }
  return is_auto ? L2{0, value} : L2{*value, std::nullopt};
}

bool FitOptions::is_alive(int client, int64_t round) const {
  for (const Failure& failure : failures) {
    if (failure.client == client && failure.first <= round && round <= failure.last) return false;
  }
  return true;
}

}  // namespace tandem::fit
