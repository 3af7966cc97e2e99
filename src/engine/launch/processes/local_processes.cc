#include "engine/launch/processes/local_processes.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <utility>

#include "comm/processes/shared/snapshot_memory_file.h"
#include "comm/rendezvous/launch.h"
#include "core/system/env.h"
#include "core/system/machine.h"
#include "engine/launch/stop_signals.h"
#include "tandem/error.h"

namespace tandem {

control::Connection make_snapshot_memory() {
  return control::Connection(env().snapshot_memory < 0 ? processes::create_snapshot_memory() : -1);
}

std::string describe_end(int status) {
  return WIFSIGNALED(status) ? fmt::format("was ended by signal {}, {}", WTERMSIG(status),
                                           strsignal(WTERMSIG(status)))
                             : fmt::format("ended with exit status {}", WEXITSTATUS(status));
}

bool runs_tandem(const std::vector<std::string>& command, std::string_view subcommand) {
  const std::string program = command.front().substr(command.front().rfind('/') + 1);
  return program == "tandem" && command.size() > 1 && command[1] == subcommand;
}

LocalProcesses::LocalProcesses(int slots, std::vector<std::string> command, const sigset_t& mask,
                               int snapshot_memory, Print print)
    : command_(std::move(command)),
      mask_(mask),
      print_(std::move(print)),
      host_(host_name()),
      processes_(size_t(slots)),
      memory_(snapshot_memory) {
  const bool trains = runs_tandem(command_, "train");
  for (const int signal : {SIGUSR1, SIGUSR2}) {
    const bool is_blocked = trains || sigismember(&inherited_signals(), signal) == 1;
    is_blocked ? sigaddset(&mask_, signal) : sigdelset(&mask_, signal);
  }
}

LocalProcesses::~LocalProcesses() {
  for (LaunchedProcess& each : processes_) each.send_signal(SIGKILL);
  for (LaunchedProcess& each : processes_) each.wait_for_end();
}

void LocalProcesses::use_board(control::Board& board, double step_timeout_s) {
  board_ = &board;
  hang_watch_.emplace(board, step_timeout_s);
}

void LocalProcesses::start(int slot, const Variables& variables) {
  drain(slot);
  Variables all = variables;
  std::vector<int> shared;
  if (board_) shared.push_back(board_->fd());
  all.emplace_back(control::kMembershipVariable,
                   board_ ? control::Member::describe(*board_, slot) : "");
  if (memory_ >= 0) {
    shared.push_back(memory_);
    all.emplace_back(processes::kSnapshotMemoryVariable, std::to_string(memory_));
  }
  for (std::string& name : variables_of_other_launchers()) all.emplace_back(std::move(name), "");
  const bool is_first = process(slot).pid() < 0;
  try {
    processes_[size_t(slot)].start(command_, all, shared, mask_);
  } catch (const Error& error) {
    if (is_first) throw;
    not_started_[slot] = fmt::format("was not started: {}", error.what());
  }
}

std::optional<ProcessEnd> LocalProcesses::take_end(int slot) {
  if (const auto why = not_started_.extract(slot)) return ProcessEnd{SIGKILL, why.mapped()};
  int status = 0;
  if (!processes_[size_t(slot)].has_ended(status)) return {};
  return ProcessEnd{status, describe_end(status)};
}

std::string LocalProcesses::find_hang(int slot) {
  return hang_watch_ ? hang_watch_->check(slot, pid(slot)) : "";
}

void LocalProcesses::add_descriptors(std::vector<pollfd>& to) const {
  for (const LaunchedProcess& each : processes_) {
    for (const int stream : {0, 1}) to.push_back({each.output(stream), POLLIN, 0});
  }
}

void LocalProcesses::serve(std::span<const pollfd> ready) {
  for (size_t i = 0; i < ready.size(); ++i) {
    if (ready[i].revents != 0) pass_on(int(i / 2), int(i % 2));
  }
}

bool LocalProcesses::has_output(int slot) const {
  return process(slot).output(0) >= 0 || process(slot).output(1) >= 0;
}

void LocalProcesses::drain(int slot) {
  for (const int stream : {0, 1}) {
    pollfd output{process(slot).output(stream), POLLIN, 0};
    while (output.fd >= 0 && poll(&output, 1, 0) > 0) {
      pass_on(slot, stream);
      output.fd = process(slot).output(stream);
    }
  }
}

void LocalProcesses::pass_on(int slot, int stream) {
  processes_[size_t(slot)].pass_on(
      stream, [&](int, const std::string& line) { print_(slot, stream, line); });
}

}  // namespace tandem
