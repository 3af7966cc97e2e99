// Processes of a `tandem launch`, on this host or on several. A process is a slot: first those of
// the ranks, then the spares.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/rendezvous/membership.h"
#include "engine/launch/processes/launched_process.h"

namespace tandem {

struct ProcessEnd {
  int status;         ///< wait's
  std::string cause;  ///< "was ended by signal 9, Killed"
};

/// "was ended by signal 9, Killed" or "ended with exit status 2", from wait's status.
std::string describe_end(int status);

class RankProcesses {
 public:
  virtual ~RankProcesses() = default;

  /// Board whose slots processes have from now on; it must outlive them.
  virtual void use_board(control::Board& board, double step_timeout_s) = 0;
  /// Starts the slot's process, again if one has ended, with changes to the environment. Throws
  /// InvalidArgument or Unsupported if the first one cannot be started; over a network, `serve`
  /// throws it. A later one that cannot has ended: `take_end` says why.
  virtual void start(int slot, const Variables& variables) = 0;
  /// Gives a slot whose process has ended a host on which another can be started. False: none is
  /// left.
  virtual bool find_host(int slot) = 0;

  virtual bool is_running(int slot) const = 0;
  /// Number of the last process that was started; 0: not known yet.
  virtual pid_t pid(int slot) const = 0;
  virtual int host_index(int slot) const = 0;
  virtual const std::string& host(int slot) const = 0;
  /// Sends a signal to the slot's process and those that it has started, if it runs.
  virtual void send_signal(int slot, int signal) = 0;
  /// End of the slot's process since the last call.
  virtual std::optional<ProcessEnd> take_end(int slot) = 0;
  /// Reason why the slot's process hangs; empty: it does not.
  virtual std::string find_hang(int slot) = 0;

  /// Adds what `serve` waits for.
  virtual void add_descriptors(std::vector<pollfd>& to) const = 0;
  /// Passes on output and events: for the descriptors that were added, in their order, also if none
  /// is ready.
  virtual void serve(std::span<const pollfd> ready) = 0;
  /// Whether output of the slot's process may follow.
  virtual bool has_output(int slot) const = 0;
};

}  // namespace tandem
