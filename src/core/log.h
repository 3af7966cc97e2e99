// Messages on standard error: what a user may want to know though nothing failed. spdlog's headers
// cost some ten seconds of compiling, so one file has them.
#pragma once

#include <string>

namespace tandem {

enum class LogLevel { debug, info, warn };

/// One line, if TANDEM_LOG shows this level.
void log_message(LogLevel level, const std::string& text);

/// Throws InvalidArgument if TANDEM_LOG names no level.
void check_log_level();

}  // namespace tandem
