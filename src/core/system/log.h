// Messages on standard error, for events that are no errors. One source file includes spdlog, whose
// headers take some ten seconds to compile.
#pragma once

#include <string>

namespace tandem {

enum class LogLevel { debug, info, warn };

/// Prints one line if TANDEM_LOG enables this level.
void log_message(LogLevel level, const std::string& text);

/// Throws InvalidArgument if TANDEM_LOG is not a level.
void check_log_level();

}  // namespace tandem
