// `tandem launch -n N -- COMMAND`: the ranks of a world as processes of this machine.
#pragma once

#include <string>
#include <vector>

namespace tandem::cli {

/// Starts `ranks` processes of the command, with torchrun's variables, and runs their rendezvous
/// store in this process. Their output comes line by line, after the rank's number if there are
/// several. When one fails, says which and how, gives the others a moment to report that they were
/// aborted, and ends them. Signals that stop this process are passed on.
///
/// Returns the exit status of the first process that failed, 128 + the signal for a killed one; 0
/// if none has. Throws InvalidArgument for a command that cannot be run.
int launch_here(int ranks, const std::vector<std::string>& command);

}  // namespace tandem::cli
