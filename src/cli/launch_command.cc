#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/json.h"
#include "core/system/output.h"
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
  std::string json;
  LaunchRequest processes;
};

void probe(const LaunchOptions& options) {
  const auto& [ranks, tp, pp] = options.probe;
  const ProbeResult result = probe_world(options.probe);
  if (!options.json.empty()) {
    const nlohmann::ordered_json json{{"ranks", ranks},
                                      {"tp", tp},
                                      {"pp", pp},
                                      {"dp", ranks / (tp * pp)},
                                      {"processes", result.processes},
                                      {"world_s", result.world_s},
                                      {"groups_s", result.groups_s},
                                      {"barrier_ms", result.barrier_ms},
                                      {"bytes_per_rank", result.bytes_per_rank}};
    const std::string text = dump_json(json) + "\n";
    options.json == "-" ? fmt::print("{}", text) : write_output(options.json, text);
  }
  if (options.json == "-") return;
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

}  // namespace

void add_launch(CLI::App& app) {
  auto* command = app.add_subcommand(
      "launch", "Start the ranks of a world as processes, here or on several hosts");
  auto options = std::make_shared<LaunchOptions>();
  command->add_option("-n,--ranks", options->processes.ranks, "Processes to start")
      ->check(CLI::Range(1, kMaxRanks));
  command
      ->add_option(
          "--spares", options->processes.spares,
          "Further processes, without a rank: each takes that of a killed one, and the run "
          "continues (tandem train)")
      ->check(CLI::Range(0, kMaxRanks));
  command
      ->add_option("--restarts", options->processes.restarts,
                   "New processes to start for killed ones when no spare is left (tandem train); "
                   "times to start all ranks again when one is lost (tandem serve)")
      ->check(CLI::Range(0, kMaxRestarts));
  command
      ->add_option("--min-dp", options->processes.min_dp,
                   "When no process can take a lost rank: continue with fewer data-parallel ranks, "
                   "down to so many, and the same bits (tandem train; 0: end)")
      ->check(CLI::Range(0, kMaxRanks));
  command
      ->add_option("--start-timeout", options->processes.start_timeout_s,
                   "Seconds in which a host must start, and a rank must begin its first step, else "
                   "it is replaced")
      ->capture_default_str()
      ->check(CLI::Range(1e-3, 1e9));
  command->add_option("--hosts", options->processes.hosts,
                      "File of hosts for the ranks and spares, one a line: name [slots=MAX_RANKS]");
  command
      ->add_option("--remote-shell", options->processes.remote_shell,
                   "Command that runs another on a host: the host's name and that command follow")
      ->capture_default_str();
  command
      ->add_option("--port", options->processes.port,
                   fmt::format("With --hosts: listen at this port, and for ranks at one of the {} "
                               "after it (default: any); without: MASTER_PORT of the ranks (29500)",
                               kStorePorts))
      ->check(CLI::Range(1, kMaxPort));
  command
      ->add_option("--host-timeout", options->processes.host_timeout_s,
                   "Seconds without a sign of life of a host, after which its ranks are replaced")
      ->capture_default_str()
      ->check(CLI::Range(1., 1e9));
  command
      ->add_flag_callback(
          "--executor",
          [] {
            run_executor();
            throw Ended{0};
          },
          "")
      ->group("");
  command
      ->add_option("--step-timeout", options->processes.step_timeout_s,
                   "Max seconds of one operation or file access of a step, else the rank is "
                   "replaced (0: only hangs are found, in operations that were finished before)")
      ->check(CLI::Range(0., 1e9));
  command->add_option("--out", options->processes.out,
                      "Folder for events.jsonl: ranks lost, hung, recovered; and faults.jsonl");
  command->add_option("--live", options->processes.live,
                      "Serve a page of the run at [HOST:]PORT while its ranks end and are replaced "
                      "(tandem train; events.jsonl goes to its --out)");
  command->add_flag("--diagnose", options->diagnoses,
                    "After a run that failed, print what tandem doctor says of it");
  command->add_option(
      "--inject", options->processes.inject,
      "For tests: faults to cause in the ranks' processes (kill, hang, pause, slow): a file "
      "(TOML), or random:SEED,RATE in each step and rank");
  command->add_option("command", options->processes.command, "Command of each rank, after --");
  command
      ->add_option("--probe", options->probe.ranks,
                   "Measure instead how long a world of so many ranks takes to form: each with its "
                   "connections, threads and groups, but without a model; 128 share a process")
      ->check(CLI::Range(1, kMaxProbeRanks));
  command->add_option("--tp", options->probe.tp, "Ranks of a tensor-parallel group")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProbeRanks));
  command->add_option("--pp", options->probe.pp, "Pipeline ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, kMaxProbeRanks));
  command->add_option("--json", options->json,
                      "Write the results to this file (-: print only them)");
  command->footer(
      "\nProcesses find each other by torchrun's variables (RANK, WORLD_SIZE, ...) and a "
      "rendezvous\n"
      "store in the launcher, on one host without an open port. Lines of output begin with the "
      "rank. When a "
      "rank\n"
      "fails, one line says which, the others end, and its exit status is that of the launcher.\n"
      "It holds the memory of the ranks' snapshots (checkpoint.snapshot_every), from which ranks "
      "that\n"
      "the command starts again with --resume restore their state.\n"
      "\nSIGUSR1 and SIGUSR2 are passed on (tandem train: save a checkpoint). A launch of tandem "
      "train "
      "that\n"
      "gives up first writes the newest snapshot that is in memory to its --out, for --resume.\n"
      "\n--spares, --restarts: when a process of tandem train is killed or hangs, another takes "
      "its "
      "rank,\n"
      "the other ranks stay in theirs, and all continue from the newest checkpoint. A killed "
      "launcher is\n"
      "started again, on one host: docs/guide/recovery.md.\n"
      "Ranks of tandem serve have no checkpoint: when one is lost, all are started again.\n"
      "\n--hosts: an executor on each host starts its ranks and spares, passes on their output "
      "and\n"
      "connects to a port of this launcher. The program and this folder must exist on every host.\n"
      "A host that is lost counts as the loss of its ranks.\n"
      "\n--probe: the world is formed with the library's own rendezvous store, ranks and groups. "
      "Every "
      "rank\n"
      "exchanges its number with its tensor-, pipeline- and data-parallel groups, and the members\n"
      "are checked. Memory is that of all ranks and the store, beyond that of the program.\n"
      "\nExamples:\n"
      "  tandem launch -n 2 -- tandem train configs/tiny.toml --tp 2 --out out/launched\n"
      "  tandem launch -n 2 --spares 1 -- tandem train configs/tiny.toml --tp 2 --out out/spared\n"
      "  tandem launch -n 2 --restarts 3 --live 8080 -- tandem train configs/tiny.toml --tp 2 "
      "--out "
      "out/live\n"
      "  tandem launch --hosts hosts.txt -n 2 -- tandem train configs/tiny.toml --tp 2 --out "
      "out/hosts\n"
      "  tandem launch --probe 64 --tp 4 --pp 2\n"
      "  tandem launch --probe 512 --tp 8 --pp 8 --json -");
  command->callback([options] { launch(*options); });
}

}  // namespace tandem::cli
