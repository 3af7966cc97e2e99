// Processes of a launch on this host.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/rendezvous/connection.h"
#include "comm/rendezvous/hang_watch.h"
#include "engine/launch/processes/rank_processes.h"

namespace tandem {

class LocalProcesses final : public RankProcesses {
 public:
  using Print = std::function<void(int slot, int stream, const std::string& line)>;

  /// `mask`: of their signals; in a training SIGUSR1 and SIGUSR2 wait until it takes them, in
  /// other commands they are as this process found them.
  /// `snapshot_memory`: file that they inherit, which must outlive this
  /// object; -1: none, or that of this process.
  LocalProcesses(int slots, std::vector<std::string> command, const sigset_t& mask,
                 int snapshot_memory, Print print);
  /// Ends them.
  ~LocalProcesses() override;
  LocalProcesses(const LocalProcesses&) = delete;
  LocalProcesses& operator=(const LocalProcesses&) = delete;

  void use_board(control::Board& board, double step_timeout_s) override;
  void start(int slot, const Variables& variables) override;
  bool find_host(int) override { return true; }
  bool is_running(int slot) const override {
    return process(slot).running() || not_started_.contains(slot);
  }
  pid_t pid(int slot) const override { return process(slot).pid(); }
  int host_index(int) const override { return 0; }
  const std::string& host(int) const override { return host_; }
  void send_signal(int slot, int signal) override { process(slot).send_signal(signal); }
  std::optional<ProcessEnd> take_end(int slot) override;
  std::string find_hang(int slot) override;
  void add_descriptors(std::vector<pollfd>& to) const override;
  void serve(std::span<const pollfd> ready) override;
  bool has_output(int slot) const override;

  /// Passes on what the slot's process has written so far.
  void drain(int slot);

 private:
  const LaunchedProcess& process(int slot) const { return processes_[size_t(slot)]; }
  void pass_on(int slot, int stream);

  const std::vector<std::string> command_;
  sigset_t mask_;
  const Print print_;
  const std::string host_;
  std::vector<LaunchedProcess> processes_;
  std::map<int, std::string> not_started_;  ///< why, by slot, of processes whose end was not taken
  const control::Board* board_ = nullptr;
  std::optional<control::HangWatch> hang_watch_;
  const int memory_;
};

/// Whether the command is `tandem` with this subcommand.
bool runs_tandem(const std::vector<std::string>& command, std::string_view subcommand);

/// New memory for the snapshots of ranks; none if this process was given one, which they inherit.
control::Connection make_snapshot_memory();

}  // namespace tandem
