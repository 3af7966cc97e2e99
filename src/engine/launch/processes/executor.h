// Executor of `tandem launch --hosts`: a process that the launcher starts on each host, by a remote
// shell, to run that host's ranks.
#pragma once

#include <string>

namespace tandem {

/// Variables of the launcher's environment that ranks on other hosts get, by the begin of their
/// names, or all of it.
bool is_forwarded(const std::string& variable);

/// Reads its settings, with the run's secret, from standard input, connects to the launcher, and
/// serves it until that ends or is silent for too long; then ends its ranks. Throws InvalidArgument
/// for settings of another program, Error if the launcher cannot be reached or refuses it.
void run_executor();

}  // namespace tandem
