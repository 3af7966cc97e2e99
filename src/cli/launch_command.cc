#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/launch/local_launch.h"
#include "engine/launch/probe.h"
#include "engine/launch/processes/executor.h"
#include "engine/launch/stop_signals.h"
#include "engine/report/diagnosis.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kMaxPort = 65535 - kStorePorts;
constexpr int kMaxProbeRanks = 8192, kMaxRanks = 1024, kMaxRestarts = 1000000;

struct LaunchOptions {
  ProbeRequest probe{.ranks = 0};
  bool diagnoses = false;
  ResultOutput output;
  LaunchRequest processes;
};

void probe(const LaunchOptions& options) {
  options.output.check();
  const auto& [ranks, tp, pp] = options.probe;
  const ProbeResult result = probe_world(options.probe);
  if (options.output.is_given()) {
    const nlohmann::ordered_json json{{"ranks", ranks},
                                      {"tp", tp},
                                      {"pp", pp},
                                      {"dp", ranks / (tp * pp)},
                                      {"processes", result.processes},
                                      {"world_s", result.world_s},
                                      {"groups_s", result.groups_s},
                                      {"barrier_ms", result.barrier_ms},
                                      {"bytes_per_rank", result.bytes_per_rank}};
    options.output.write_json(dump_json(json) + "\n");
  }
  if (!options.output.shows_text()) return;
  fmt::print(
      "{} ranks, tp {} pp {} dp {}, in {} process{} of this machine\n"
      "world         {:8.3f} s\n"
      "groups        {:8.3f} s\n"
      "barrier       {:8.1f} ms\n"
      "memory a rank {:8.2f} MB\n",
      ranks, tp, pp, ranks / (tp * pp), result.processes, result.processes == 1 ? "" : "es",
      result.world_s, result.groups_s, result.barrier_ms, double(result.bytes_per_rank) / 1e6);
}

/// Prints what `tandem doctor` says of the run in `out`.
void print_diagnosis(const std::string& out) {
  complain("tandem: launch: tandem doctor " + shell_quote(out) + ":");
  try {
    for (const std::string& line : report::diagnose(out)) complain(single_line(line));
  } catch (const IoError& error) {
    complain(single_line(error.what()));
  }
}

void launch_processes(const LaunchOptions& options) {
  const std::string out = training_output(options.processes);
  if (options.diagnoses && out.empty()) {
    throw InvalidArgument(
        fmt::format("launch --diagnose: command {}: expected tandem train … --out OUT",
                    printable(options.processes.command.front())));
  }
  const pid_t typed = getpid();
  const int status = run_launch(options.processes);
  if (status == 0) return;
  const bool was_stopped = status == kStopped || status == 128 + SIGTERM;
  // A child of this process that launches returns here, too.
  if (options.diagnoses && !was_stopped && getpid() == typed) print_diagnosis(out);
  throw Ended{status};
}

void launch(const LaunchOptions& options) {
  if ((options.processes.ranks > 0) == (options.probe.ranks > 0)) {
    throw InvalidArgument("launch: expected either -n with a command, or --probe");
  }
  if (options.probe.ranks > 0) {
    if (!options.processes.live.empty()) {
      throw InvalidArgument(fmt::format("launch --probe: --live {}: expected none",
                                        printable(options.processes.live)));
    }
    if (!options.processes.command.empty()) {
      throw InvalidArgument(fmt::format("launch --probe: command {}: expected none",
                                        printable(options.processes.command.front())));
    }
    return probe(options);
  }
  if (options.processes.command.empty()) {
    throw InvalidArgument("launch: no command: expected tandem launch -n N -- COMMAND…");
  }
  launch_processes(options);
}

void add_process_options(CLI::App& command, LaunchRequest& request) {
  command.option_defaults()->group("Processes");
  command.add_option("-n,--ranks", request.ranks, "Number of processes to start")
      ->check(CLI::Range(1, kMaxRanks));
  command
      .add_option("--port", request.port,
                  fmt::format("Listen at this port, and for ranks at one of the {} after it, with "
                              "--hosts (default: any); else MASTER_PORT of the ranks (default: "
                              "29500)",
                              kStorePorts))
      ->check(CLI::Range(1, kMaxPort));
  command
      .add_option("--start-timeout", request.start_timeout_s,
                  "Replace a host that does not start, or a rank that does not begin its first "
                  "step, in X seconds")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e9));
  command
      .add_flag_callback(
          "--executor",
          [] {
            run_executor();
            throw Ended{0};
          },
          "")
      ->group("");
  command.add_option("command", request.command, "Command of each rank, after --");
}

void add_recovery_options(CLI::App& command, LaunchRequest& request) {
  command.option_defaults()->group("Lost ranks");
  command
      .add_option("--spares", request.spares,
                  "Start N further processes without a rank; each takes the rank of a killed one "
                  "(tandem train)")
      ->check(CLI::Range(0, kMaxRanks));
  command
      .add_option("--restarts", request.restarts,
                  "Replace up to N killed processes by new ones when no spare is left (tandem "
                  "train); start all ranks again up to N times when one is lost (tandem serve)")
      ->check(CLI::Range(0, kMaxRestarts));
  command
      .add_option("--min-dp", request.min_dp,
                  "When no process can take a lost rank, continue with fewer data-parallel ranks, "
                  "at least N, and the same bits (tandem train; 0: end)")
      ->check(CLI::Range(0, kMaxRanks));
  command
      .add_option("--step-timeout", request.step_timeout_s,
                  "Replace a rank when one operation or file access of a step takes more than X "
                  "seconds (0: find only hangs in operations that were finished before)")
      ->check(CLI::Range(0., 1e9));
}

void add_host_options(CLI::App& command, LaunchRequest& request) {
  command.option_defaults()->group("Several hosts");
  command.add_option("--hosts", request.hosts,
                     "File of hosts for the ranks and spares, one a line: name [slots=MAX_RANKS]");
  command
      .add_option("--remote-shell", request.remote_shell,
                  "Command that runs another on a host; the host's name and that command follow")
      ->capture_default_str();
  command
      .add_option("--host-timeout", request.host_timeout_s,
                  "Replace the ranks of a host without a sign of life for X seconds")
      ->capture_default_str()
      ->check(CLI::Range(1., 1e9));
}

void add_output_options(CLI::App& command, LaunchOptions& options) {
  command.option_defaults()->group("Output");
  command.add_option("--out", options.processes.out,
                     "Folder for events.jsonl (ranks lost, hung, recovered) and faults.jsonl");
  command.add_option("--live", options.processes.live,
                     "Serve a page of the run while its ranks end and are replaced (tandem train; "
                     "events.jsonl goes to its --out)");
  command.add_flag("--diagnose", options.diagnoses,
                   "Print what tandem doctor says of a run that failed");
  command
      .add_option("--inject", options.processes.inject,
                  "Cause faults in the ranks' processes, for tests (kill, hang, pause, slow): from "
                  "a TOML file, or random in each step and rank")
      ->option_text("FILE|random:SEED,RATE");
}

void add_probe_options(CLI::App& command, LaunchOptions& options) {
  command.option_defaults()->group("Time to form a world");
  command
      .add_option("--probe", options.probe.ranks,
                  "Measure how long a world of N ranks takes to form, instead: each with its "
                  "connections, threads and groups, without a model; 128 share a process")
      ->check(CLI::Range(1, kMaxProbeRanks));
  command.add_option("--tp", options.probe.tp, "Ranks of a tensor-parallel group")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProbeRanks));
  command.add_option("--pp", options.probe.pp, "Pipeline ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProbeRanks));
  add_json_option(command, options.output);
}

constexpr const char* kLaunchFooter = R"(
Processes find each other by torchrun's variables (RANK, WORLD_SIZE, ...) and a rendezvous
store in the launcher, on one host without an open port. Lines of output begin with the rank.
When a rank fails, one line says which, the others end, and its exit status is that of the
launcher. It holds the memory of the ranks' snapshots (checkpoint.snapshot_every), from which
ranks that the command starts again with --resume restore their state.

SIGUSR1 and SIGUSR2 are passed on (tandem train: save a checkpoint). A launch of tandem train
that gives up first writes the newest snapshot that is in memory to its --out, for --resume.

--spares, --restarts: when a process of tandem train is killed or hangs, another takes its
rank, the other ranks stay in theirs, and all continue from the newest checkpoint. A killed
launcher is started again, on one host: docs/guide/recovery.md. Ranks of tandem serve have no
checkpoint: when one is lost, all are started again.

--hosts: an executor on each host starts its ranks and spares, passes on their output and
connects to a port of this launcher. The program and this folder must exist on every host. A
host that is lost counts as the loss of its ranks.

--probe: the world is formed with the library's own rendezvous store, ranks and groups. Every
rank exchanges its number with its tensor-, pipeline- and data-parallel groups, and the
members are checked. Memory is that of all ranks and the store, beyond that of the program.

Examples:
  tandem launch -n 2 -- tandem train configs/tiny.toml --tp 2 --out out/launched
  tandem launch -n 2 --spares 1 -- tandem train configs/tiny.toml --tp 2 --out out/spared
  tandem launch -n 2 --restarts 3 --live 8080 -- tandem train configs/tiny.toml --tp 2 --out out/web
  tandem launch --hosts hosts.txt -n 2 -- tandem train configs/tiny.toml --tp 2 --out out/hosts
  tandem launch --probe 64 --tp 4 --pp 2
  tandem launch --probe 512 --tp 8 --pp 8 --json -)";

}  // namespace

void add_launch(CLI::App& app) {
  auto* command = app.add_subcommand(
      "launch", "Start the ranks of a world as processes, here or on several hosts");
  auto options = std::make_shared<LaunchOptions>();
  add_process_options(*command, options->processes);
  add_recovery_options(*command, options->processes);
  add_host_options(*command, options->processes);
  add_output_options(*command, *options);
  add_probe_options(*command, *options);
  command->footer(kLaunchFooter);
  command->callback([options] { launch(*options); });
}

}  // namespace tandem::cli
