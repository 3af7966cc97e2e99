#include "core/log.h"

#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "core/env.h"
#include "tandem/error.h"

namespace tandem {
namespace {

struct Threshold {
  const char* name;
  int least;  // level that is shown
};
constexpr Threshold kThresholds[] = {{"trace", 0}, {"debug", 0}, {"info", 1},
                                     {"warn", 2},  {"error", 3}, {"off", 3}};

std::optional<int> least_shown() {
  for (const Threshold& threshold : kThresholds) {
    if (env().log_level == threshold.name) return threshold.least;
  }
  return std::nullopt;
}

const char* name_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return "debug";
    case LogLevel::info:
      return "info";
    case LogLevel::warn:
      return "warning";
  }
  return "";
}

}  // namespace

void log_message(LogLevel level, const std::string& text) {
  if (int(level) < least_shown().value_or(int(LogLevel::info))) return;
  fmt::print(stderr, "tandem: {}: {}\n", name_of(level), text);
}

void check_log_level() {
  if (least_shown()) return;
  throw InvalidArgument(
      fmt::format("TANDEM_LOG={}: expected trace, debug, info, warn or error", env().log_level));
}

}  // namespace tandem
