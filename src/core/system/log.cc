#include "core/system/log.h"

#include <fmt/format.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "core/system/env.h"
#include "core/system/printable.h"
#include "core/system/terminal.h"
#include "tandem/error.h"

namespace tandem {
namespace {

spdlog::level::level_enum level_of(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warn:
      return spdlog::level::warn;
  }
  return spdlog::level::off;
}

// Logs to standard error, so that standard output contains only results.
spdlog::logger& logger() {
  static const auto instance = [] {
    const auto colors = has_colors(stderr) ? spdlog::color_mode::always : spdlog::color_mode::never;
    auto log = spdlog::stderr_color_mt("tandem", colors);
    log->set_level(spdlog::level::from_str(env().log_level));
    return log;
  }();
  return *instance;
}

}  // namespace

void log_message(LogLevel level, const std::string& text) {
  logger().log(level_of(level), single_line(text));
}

void check_log_level() {
  const std::string& name = env().log_level;
  if (spdlog::level::from_str(name) != spdlog::level::off || name == "off") return;
  throw InvalidArgument(
      fmt::format("TANDEM_LOG={}: expected trace, debug, info, warn or error", name));
}

}  // namespace tandem
