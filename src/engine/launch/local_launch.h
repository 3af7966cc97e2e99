// `tandem launch -n N -- COMMAND`: the ranks of a world as processes of this machine, or of several
// hosts.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tandem {

struct LaunchRequest {
  int ranks = 0;
  int spares = 0;    ///< further processes that wait to take the rank of one that dies
  int restarts = 0;  ///< max number of new processes for that, once no spare is left
  int min_dp = 0;    ///< continue with fewer replicas, down to so many, once neither is left; 0: no
  double start_timeout_s = 600;  ///< max time from a generation's begin to a rank's first step
  double step_timeout_s = 0;     ///< max time in one operation or file access of a step; 0: no max
  /// Hosts, a file (launch_hosts.h); empty: this machine only. Command that runs another on a host:
  /// its words, the host and the other command as one word follow.
  std::string hosts, remote_shell = "ssh -o BatchMode=yes";
  /// On several hosts: that executors connect to; stores of the ranks take free ones of the
  /// kStorePorts after it. On one host: part of names only. 0: any, on one host 29500.
  int port = 0;
  double host_timeout_s = 20;  ///< without a sign of life of a host, after which it is lost
  std::string out;             ///< folder for events.jsonl; empty: none is written
  std::string live;            ///< [HOST:]PORT of the live page; events go to the training's output
  std::string inject;          ///< faults to cause in the ranks' processes: launch_injector.h
  std::vector<std::string> command;
  /// Takes the lines of output (stream 0) and errors (1) of each process; empty: they are printed.
  /// With it, a rank's own exit status is not reported in a line.
  std::function<void(int slot, int stream, const std::string& line)> print;

  /// Whether lost ranks are replaced.
  bool replaces() const { return spares > 0 || restarts > 0 || min_dp > 0; }
};

constexpr int kStorePorts = 16;

/// --out of `tandem train`; empty without.
std::string training_output(const LaunchRequest& request);

/// Starts the processes of the command, with torchrun's variables, and runs their rendezvous
/// store in this process. Their output comes line by line, after the rank's number if there are
/// several. When one is killed or hangs, it is replaced if the request says so, and one line says
/// so once all ranks train again (launch_members.h). Without, or when one fails, says which and
/// how, gives the others a moment to report that they were aborted, and ends them. Signals that
/// stop this process are passed on.
///
/// `tandem serve` with restarts: when a rank is lost, all end and are started again.
///
/// On several hosts an executor on each of them does so for its processes (remote_processes.h), and
/// a host that is lost counts as the loss of its ranks.
///
/// Returns the exit status of the first process that failed, 128 + the signal for a killed one; 0
/// if none has. Throws InvalidArgument for a command that cannot be run, or whose ranks cannot be
/// replaced; Error naming a host whose executor does not start.
int run_launch(const LaunchRequest& request);

}  // namespace tandem
