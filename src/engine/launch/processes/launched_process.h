// Process that `tandem launch` starts: its environment, output and signals.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/rendezvous/connection.h"

namespace tandem {

/// Variables to set in a process's environment; without a value: to remove from it.
using Variables = std::vector<std::pair<std::string, std::string>>;

using PrintLine = std::function<void(int stream, const std::string& line)>;
/// Prints to standard output (0) or error (1).
void print_line(int stream, const std::string& line);

class LaunchedProcess {
 public:
  /// Starts the command in a process group of its own, which dies with this process. `shared`:
  /// descriptors that it inherits, under the same numbers. `mask`: of its signals. `input`: its
  /// standard input; -1: this process's. Other threads may run. Throws InvalidArgument if the
  /// command cannot be run, Unsupported or IoError if no process can be made; its number is 0 then.
  void start(const std::vector<std::string>& command, const Variables& variables,
             const std::vector<int>& shared, const sigset_t& mask, int input = -1);

  bool running() const { return running_; }
  /// Number of the last process; -1: none was started.
  pid_t pid() const { return pid_; }
  /// Sends the signal to its process group, while it runs.
  void send_signal(int signal) const;
  /// Whether it has ended since the last call; then `status` is wait's.
  bool has_ended(int& status);
  void wait_for_end();

  /// Descriptor of its standard output (0) or error (1); -1 once that was closed.
  int output(int stream) const { return output_[stream].fd(); }
  /// Passes what has arrived there to `print`, line by line, each with its end.
  void pass_on(int stream, const PrintLine& print);

 private:
  pid_t pid_ = -1;
  bool running_ = false;
  control::Connection output_[2];
  std::string line_[2];  ///< bytes of an unfinished line
};

}  // namespace tandem
