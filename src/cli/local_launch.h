// `tandem launch -n N -- COMMAND`: the ranks of a world as processes of this machine.
#pragma once

#include <string>
#include <vector>

namespace tandem::cli {

struct LaunchRequest {
  int ranks = 0;
  int spares = 0;    ///< further processes that wait to take the rank of one that dies
  int restarts = 0;  ///< max number of new processes for that, once no spare is left
  std::string out;   ///< folder for events.jsonl; empty: none is written
  std::vector<std::string> command;
};

/// Starts the processes of the command, with torchrun's variables, and runs their rendezvous
/// store in this process. Their output comes line by line, after the rank's number if there are
/// several. When one is killed, a spare or a new process takes its rank, and one line says so once
/// all ranks train again (launch_members.h). Without, or when one fails, says which and how, gives
/// the others a moment to report that they were aborted, and ends them. Signals that stop this
/// process are passed on.
///
/// Returns the exit status of the first process that failed, 128 + the signal for a killed one; 0
/// if none has. Throws InvalidArgument for a command that cannot be run, or whose ranks cannot be
/// replaced.
int launch_here(const LaunchRequest& request);

}  // namespace tandem::cli
