#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>

#include "core/system/printable.h"
#include "tandem/communicator.h"

namespace tandem {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};
constexpr std::array<Unit, 8> kRates{{{"B/s", 1},
                                      {"kB/s", 1e3},
                                      {"MB/s", 1e6},
                                      {"GB/s", 1e9},
                                      {"bit/s", 1.0 / 8},
                                      {"kbit/s", 1e3 / 8},
                                      {"Mbit/s", 1e6 / 8},
                                      {"Gbit/s", 1e9 / 8}}};
constexpr std::array<Unit, 3> kTimes{{{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}}};

// Limits of the clock: the emulation adds up times in nanoseconds.
constexpr double kMinRate = 1, kMaxRate = 1e15, kMaxLatency = 3600;

std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// Value of a text such as "20us" in `units`; negative if malformed. May be infinite.
double quantity(std::string_view text, std::span<const Unit> units) {
  text = trim(text);
  double value = 0;
  const auto [stop, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || !std::isfinite(value) || value < 0) return -1;
  const std::string_view unit = trim(text.substr(size_t(stop - text.data())));
  for (const Unit& candidate : units) {
    if (unit == candidate.name) return value * candidate.factor;
  }
  return -1;
}

/// Description of the first value out of range; "" if there is none.
std::string out_of_range(const EmulatedLink& link) {
  if (!(link.bytes_per_s >= kMinRate && link.bytes_per_s <= kMaxRate)) {
    return fmt::format("a rate of {:g} B/s: expected {:g} to {:g} B/s", link.bytes_per_s, kMinRate,
                       kMaxRate);
  }
  if (!(link.latency_s >= 0 && link.latency_s <= kMaxLatency)) {
    return fmt::format("a latency of {:g} s: expected 0 to {:g} s", link.latency_s, kMaxLatency);
  }
  return "";
}

}  // namespace

EmulatedLink EmulatedLink::parse(std::string_view text) {
  const size_t comma = text.find(',');
  const double rate = quantity(text.substr(0, comma), kRates);
  const double latency =
      comma == std::string_view::npos ? -1 : quantity(text.substr(comma + 1), kTimes);
  if (rate < 0 || latency < 0) {
    throw InvalidArgument(
        fmt::format("link '{}': expected RATE,LATENCY such as 1GB/s,20us "
                    "(B/s kB/s MB/s GB/s bit/s kbit/s Mbit/s Gbit/s; s ms us)",
                    printable(text)));
  }
  const EmulatedLink link{rate, latency};
  if (const std::string wrong = out_of_range(link); !wrong.empty()) {
    throw InvalidArgument(fmt::format("link '{}': {}", printable(text), wrong));
  }
  return link;
}

void EmulatedLink::check() const {
  const std::string wrong = out_of_range(*this);
  if (!wrong.empty()) throw InvalidArgument("link: " + wrong);
}

std::string EmulatedLink::describe() const {
  const Unit rate = bytes_per_s >= 1e9   ? kRates[3]
                    : bytes_per_s >= 1e6 ? kRates[2]
                    : bytes_per_s >= 1e3 ? kRates[1]
                                         : kRates[0];
  const Unit time = latency_s >= 1 ? kTimes[0] : latency_s >= 1e-3 ? kTimes[1] : kTimes[2];
  return fmt::format("emulated {:g} {} {:g} {}", bytes_per_s / rate.factor, rate.name,
                     latency_s / time.factor, time.name);
}

}  // namespace tandem
