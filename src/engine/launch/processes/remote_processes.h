// Processes of a launch on several hosts, which an executor on each of them runs (executor.h).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/admission.h"
#include "engine/launch/local_launch.h"
#include "engine/launch/processes/executor_channel.h"
#include "engine/launch/processes/launch_hosts.h"
#include "engine/launch/processes/local_processes.h"
#include "engine/launch/processes/rank_processes.h"

namespace tandem {

class RemoteProcesses final : public RankProcesses {
 public:
  /// Starts the executors. `secret`: text of the run's; `mask`: signals of the remote shells.
  /// Throws InvalidArgument for a file of hosts or a remote shell that cannot be used.
  RemoteProcesses(const LaunchRequest& request, const std::string& run_id,
                  const std::string& secret, const sigset_t& mask, LocalProcesses::Print print);
  /// Lets the executors end, and ends the remote shells.
  ~RemoteProcesses() override;
  RemoteProcesses(const RemoteProcesses&) = delete;
  RemoteProcesses& operator=(const RemoteProcesses&) = delete;

  /// Waits until all executors have connected. Throws Error naming the host if one does not, or
  /// runs another program; Ended after a signal to stop from the descriptor `signals`.
  void connect(int signals);

  void use_board(control::Board& board, double step_timeout_s) override;
  void start(int slot, const Variables& variables) override;
  bool find_host(int slot) override;
  bool is_running(int slot) const override { return slots_[size_t(slot)].running; }
  pid_t pid(int slot) const override { return slots_[size_t(slot)].pid; }
  int host_index(int slot) const override { return slots_[size_t(slot)].host; }
  const std::string& host(int slot) const override { return hosts_[size_t(host_index(slot))].name; }
  void send_signal(int slot, int signal) override;
  std::optional<ProcessEnd> take_end(int slot) override;
  std::string find_hang(int slot) override;
  void add_descriptors(std::vector<pollfd>& to) const override;
  void serve(std::span<const pollfd> ready) override;
  bool has_output(int slot) const override { return slots_[size_t(slot)].has_output; }

 private:
  struct Slot {
    int host = 0;
    pid_t pid = 0;
    bool running = false, has_output = false;
    std::optional<ProcessEnd> end;
    std::string hang;  ///< reason, until it was asked for
    int starts = 0;    ///< of its processes
  };
  struct Host {
    std::string name;
    LaunchedProcess shell;
    ExecutorChannel channel;
    bool ready = false, lost = false;
    std::string last_line;             ///< of the shell's errors, until the executor is ready
    std::vector<std::byte> decisions;  ///< sent last
  };

  void start_shell(size_t host, const sigset_t& mask);
  std::string settings_of(size_t host) const;
  void admit();
  void check_shell(Host& host);
  void pass_on(Host& host, int stream);
  void receive(Host& host, Report report, int slot, uint64_t value, std::string_view text);
  void check_build(Host& host, bool allows_others, std::string_view text);
  void send_decisions(Host& host);
  void lose(Host& host, const std::string& why);

  const LaunchRequest request_;
  const std::string run_id_, secret_;
  const LocalProcesses::Print print_;
  std::vector<Host> hosts_;
  std::vector<Slot> slots_;
  int port_ = 0;
  std::optional<control::Admission> admission_;
  control::Board* board_ = nullptr;
};

}  // namespace tandem
