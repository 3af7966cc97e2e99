#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/help.h"
#include "comm/rendezvous/launch.h"
#include "comm/world/gpus.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "core/system/process/command_line.h"
#include "engine/checkpoint/initial_model.h"
#include "engine/checkpoint/run/resumed_replicas.h"
#include "engine/config/data_format.h"
#include "engine/config/gpu_training.h"
#include "engine/data/open_data.h"
#include "engine/launch/live_process.h"
#include "engine/launch/recover.h"
#include "engine/launch/stop_signals.h"
#include "engine/model/codec_policy.h"
#include "engine/parallel/dims.h"
#include "engine/plan/cost/memory.h"
#include "engine/train/trainer.h"

namespace tandem::cli {
namespace {

struct TrainArguments {
  std::string config, out, codec, init, inject, live;
  std::vector<std::string> overrides;
  int ranks = 0, tp = 0, cp = 0, dp = 0, ep = 0, pp = 0;
  DeviceOptions devices;
  bool resume = false;
};

/// For a process that has just had rank 0, and --out, to end.
constexpr double kOutputPatienceS = 15;

std::string launcher(int ranks) {
  if (launched_by_mpi()) return fmt::format("mpirun -n {} ... ", ranks);
  if (!launched()) return "";
  if (launched_by_environment()->has_store)
    return fmt::format("tandem launch -n {} ... -- ", ranks);
  return std::getenv("RANK") ? "torchrun ... --no-python " : fmt::format("srun -n {} ... ", ranks);
}

/// Command that resumes this run, without the launcher's own options, which are not known.
std::string resuming(int ranks) {
  std::vector<std::string> words = typed_words();
  if (std::find(words.begin(), words.end(), "--resume") == words.end()) words.push_back("--resume");
  return launcher(ranks) + joined(words);
}

/// Commands for a model of text; of token files no tokenizer is known, nor text to score.
std::string next_commands(const DataConfig& data, const TokenSource& source,
                          const std::string& out) {
  const std::string format = source.format();
  if (data.tokenizer.empty() && !has_text(format)) return "";
  const std::string folder = shell_quote(out);
  return fmt::format(
      "\nNext: tandem generate {} {}\n"
      "      tandem eval {} {}",
      folder, has_chats(format) ? "--chat MESSAGES.json" : "--prompt '#include <'", folder,
      source.held_out().files.empty() ? "--data PATH"
                                      : "--list " + shell_quote(out + "/heldout.txt"));
}

void print(const TrainEnd& end, const std::string& out, const std::string& next, int ranks) {
  const std::string loss = std::isnan(end.loss) ? "" : fmt::format(", loss {:.4f}", end.loss);
  if (end.stopped) {
    complain(fmt::format("Stopped after step {}{}: saved {}\nTo go on: {}", end.step, loss,
                         single_line(end.checkpoint), resuming(ranks)));
    return;
  }
  complain(fmt::format("{} {}{}: the model is in {}/final{}",
                       std::isnan(end.loss) ? "Nothing was left to do after step" : "Done at step",
                       end.step, loss, single_line(out), next));
}

/// Throws ConfigError if the job needs more memory than there is.
void check_memory(const TrainConfig& config, bool on_gpus, int ranks_per_gpu) {
  const MemoryEstimate estimate(config, on_gpus);
  estimate.check();
  if (!on_gpus) return;
  const Gpus gpus = this_machines_gpus();
  constexpr double kGib = 1 << 30;
  estimate.check_gpu(gpus.memory_gib * kGib / ranks_per_gpu, gpus.name);
}

/// Keeps the logical replicas and their bits with fewer data-parallel ranks.
void set_dp(TrainConfig& config, int dp, const DeviceOptions& devices) {
  auto& parallel = config.parallel;
  if (dp == 0 || dp == parallel.dp) return;
  parallel.replicas = config.parallel.logical_replicas();
  parallel.dp = dp;
  check_config(config);
  const bool is_alone = ParallelDims(parallel).ranks() == 1;
  check_memory(config, devices.on_gpus(), is_alone ? 1 : devices.ranks_per_gpu);
}

/// Throws ConfigError unless the job can continue with each number of data-parallel ranks that
/// losses may leave of it (launch --min-dp).
void check_fewer_replicas(TrainConfig fewer, int min_dp) {
  ParallelConfig& parallel = fewer.parallel;
  if (min_dp == 0 || parallel.sync.num_learners() > 1) return;
  const int64_t dp = parallel.dp;
  parallel.replicas = parallel.logical_replicas();
  while ((parallel.dp -= parallel.ep) >= min_dp) {
    try {
      check_config(fewer);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("launch --min-dp {}: with {} of {} data-parallel ranks: {}",
                                    min_dp, parallel.dp, dp, error.what()));
    }
  }
}

/// Layout of the command line over the job's.
void set_layout(const TrainArguments& arguments, ParallelConfig& parallel) {
  if (arguments.tp > 0) parallel.tp = arguments.tp;
  if (arguments.cp > 0) parallel.cp = arguments.cp;
  if (arguments.dp > 0) parallel.dp = arguments.dp;
  if (!arguments.codec.empty()) parallel.codec = CodecPolicy::parse(arguments.codec).describe();
  if (arguments.ep > 0) parallel.ep = arguments.ep;
  if (arguments.pp > 0) parallel.pp = arguments.pp;
  if (arguments.ranks == 0) return;
  const int64_t replica = parallel.tp * parallel.cp * parallel.pp;
  if (arguments.dp == 0 && arguments.ranks % replica == 0) parallel.dp = arguments.ranks / replica;
  if (replica * parallel.dp != arguments.ranks) {
    throw InvalidArgument(
        fmt::format("--ranks {}: expected {} = {}", arguments.ranks,
                    describe_product(parallel.tp, parallel.cp, parallel.dp, parallel.pp),
                    replica * parallel.dp));
  }
}

/// Reads the job and checks it. `member`: of a launcher that replaces ranks, or nullptr.
void read_request(const TrainArguments& arguments, const control::Member* member,
                  TrainRequest& request) {
  request.out = arguments.out;
  request.resume = arguments.resume;
  if (request.resume && !arguments.init.empty()) {
    throw InvalidArgument(
        fmt::format("--init {}: expected no --resume: a resumed run has its weights",
                    single_line(arguments.init)));
  }
  std::vector<std::string> notes;
  request.config = load_run_config(arguments.config, arguments.overrides, arguments.init,
                                   request.resume ? request.out : "", &notes);
  if (!request.resume) request.init = request.config.train.init;
  for (const std::string& note : notes) {
    if (speaks()) complain("note: " + note);
  }
  set_chat_keys(request.config.data);
  set_layout(arguments, request.config.parallel);
  if (request.config.check.action == "replace" && !member) {
    throw InvalidArgument(
        "check.action is replace: expected tandem launch --spares, --restarts or --min-dp, which "
        "replace a rank");
  }
  if (request.resume) {
    const std::string note = keep_replicas(request.out, request.config);
    if (!note.empty() && speaks()) complain("note: " + single_line(note));
  }
  check_config(request.config);
  if (member) check_fewer_replicas(request.config, member->min_dp());
}

/// Ranks of the job, on devices that have the memory.
WorldOptions choose_world(const TrainRequest& request, DeviceOptions& devices) {
  WorldOptions world;
  world.ranks = ParallelDims(request.config.parallel).ranks();
  const std::string& link = request.config.parallel.link;
  if (!link.empty()) world.link = EmulatedLink::parse(link);
  const auto check_gpus = [&] {
    check_gpu_training(request.config, devices.ranks_per_gpu > 1 && !launched());
    return MemoryEstimate(request.config, true).largest_rank(false).total();
  };
  if (devices.on_gpus()) check_gpus();
  set_devices(devices, world, {.check_gpus = check_gpus});
  check_memory(request.config, devices.on_gpus(), devices.ranks_per_gpu);
  return world;
}

/// Calls `train_ranks` again, with the ranks that are left, each time one was lost. Returns false
/// for a process that is to end without a rank.
bool train_as_member(control::Member& member, TrainRequest& request, const DeviceOptions& devices,
                     WorldOptions& world, const TrainEnd& end,
                     const std::function<void()>& train_ranks) {
  request.output_opened = [&member] { member.note_output(); };
  request.output_patience_s = kOutputPatienceS;
  request.rank_flops = &member.rank_flops();
  request.before_step = [&member](int64_t step) { member.note_step(step); };
  request.leave_corrupt = [&member] { member.leave(control::ProcessFault::corrupt); };
  const ParallelConfig& parallel = request.config.parallel;
  if (parallel.sync.num_learners() == 1) {  // others cannot lose a replica: no --min-dp
    // Ranks of a replica and stage leave together.
    member.note_layout(int(parallel.tp * parallel.cp), int(parallel.dp), int(parallel.pp),
                       int(parallel.ep));
  }
  return run_recovering(member, [&] {
    request.resume |= member.resumes();
    set_dp(request.config, member.dp(), devices);
    world.ranks = ParallelDims(request.config.parallel).ranks();
    if (world.ranks == 1) world.ranks_per_gpu = 1;  // without others it has all of the GPU
    train_ranks();
    member.note_step(end.step);  // also of a run in which no step was left
  });
}

void run(TrainArguments arguments) {
  TrainRequest request;  // with the time of the start
  auto* member = control::Member::of_environment();
  if (member) {
    const bool is_spare = !member->has_rank();
    if (member->join(control::Member::Clock::time_point::max()) != control::Member::Joined::yes) {
      return;  // a spare of a run that has ended without it
    }
    if (is_spare) drop_save_requests();  // the other ranks have served them
  }
  now_doing("training " + arguments.out);
  read_request(arguments, member, request);
  WorldOptions world = choose_world(request, arguments.devices);
  if (!arguments.inject.empty()) {
    request.faults = FaultPlan(read_small_file(arguments.inject), arguments.inject, world.ranks);
  }
  if (env().saves_snapshot) {
    request.resume = request.only_saves = true;
    request.output_patience_s = kOutputPatienceS;
  }
  const LiveProcess live(speaks() && !request.only_saves ? arguments.live : "", request.out);
  std::unique_ptr<const TokenSource> source;
  const auto read_data = [&](Communicator* comm) {
    source = open_data(request.config.data, request.config.model.vocab, request.config.train, comm,
                       request.resume ? manifest_path(request.out) : "");
  };
  if (!launched()) read_data(nullptr);  // shared by threads
  StopSignals signals(
      speaks() ? "ending after this step, with a checkpoint; once more to end at once" : "");
  request.stop = &signals.came();
  request.saves = &signals.saves();
  std::signal(SIGPIPE, SIG_IGN);  // the run continues without a reader of its log
  print_choice(
      std::exchange(arguments.devices.note, ""));  // once, however often ranks are replaced
  TrainEnd end;
  const auto train_ranks = [&] {
    run_ranks(arguments.devices, world, [&](Communicator& comm) {
      if (launched()) read_data(&comm);
      const TrainEnd of_rank = train(comm, request, *source);
      if (comm.rank() == 0 && !(request.only_saves && of_rank.checkpoint.empty())) {
        print(of_rank, request.out, next_commands(request.config.data, *source, request.out),
              comm.size());
      }
      if (comm.rank() == 0 || launched()) end = of_rank;
    });
  };
  if (!member) {
    train_ranks();
  } else if (!train_as_member(*member, request, arguments.devices, world, end, train_ranks)) {
    return;
  }
  if (end.stopped) throw Ended{kStopped};
}

constexpr std::string_view kAllKeys = "keys";

/// Tables of the job file, in the order of its keys.
std::vector<std::string> key_tables() {
  std::vector<std::string> tables;
  for (const ConfigKey& key : config_keys()) {
    const std::string table(key.name.substr(0, key.name.find('.')));
    if (std::ranges::find(tables, table) == tables.end()) tables.push_back(table);
  }
  return tables;
}

void print_keys(const std::string& table) {
  const std::vector<std::string> tables = key_tables();
  if (table != kAllKeys && std::ranges::find(tables, table) == tables.end()) {
    throw InvalidArgument(fmt::format("--help {}: expected one of {}, {}", printable(table),
                                      fmt::join(tables, ", "), kAllKeys));
  }
  constexpr size_t kName = 31, kColumn = kName + 2;
  std::istringstream lines(describe_config_keys());
  for (std::string line; std::getline(lines, line);) {
    if (table != kAllKeys && !line.starts_with(table + ".")) continue;
    fmt::print("  {}{}\n", line.substr(0, kName), wrapped(line.substr(kName), kColumn, kColumn));
  }
}

void add_run_options(CLI::App& command, TrainArguments& arguments) {
  command.option_defaults()->group("Job");
  command.add_option("config", arguments.config, "Job file (TOML)")->required();
  command.add_option("--out", arguments.out, "Folder for metrics, checkpoints and the model")
      ->required();
  command
      .add_option(
          "--set", arguments.overrides,
          "Override keys of the job file (table.key=value); a value is TOML, or else a string")
      ->allow_extra_args(false)
      ->take_all();
  command.add_option("--init", arguments.init,
                     "Start from the weights of a model, in a Hugging Face folder or one that "
                     "train wrote, with its keys, tokenizer and chat template; optimizer.lr is "
                     "2e-5 unless the job has another, moments are zero, the step is 0");
  command.add_flag("--resume", arguments.resume,
                   "Continue from the newest valid checkpoint in --out, or from newer snapshots "
                   "that tandem launch holds in memory");
}

void add_layout_options(CLI::App& command, TrainArguments& arguments) {
  command.option_defaults()->group("Layout");
  const CLI::Range sizes(1, 4096);
  command
      .add_option("--ranks", arguments.ranks,
                  "All ranks; without --dp, dp is ranks / (tp x cp x pp)")
      ->check(sizes);
  command.add_option("--tp", arguments.tp, "Tensor parallel ranks (parallel.tp)")->check(sizes);
  command.add_option("--cp", arguments.cp, "Context parallel ranks (parallel.cp)")->check(sizes);
  command.add_option("--dp", arguments.dp, "Data parallel ranks (parallel.dp)")->check(sizes);
  command.add_option("--pp", arguments.pp, "Pipeline parallel ranks (parallel.pp)")->check(sizes);
  command
      .add_option("--ep", arguments.ep,
                  "Expert parallel ranks, among the data parallel ones (parallel.ep)")
      ->check(sizes);
  command.add_option(
      "--codec", arguments.codec,
      "Wire format of tensor-parallel sums (int8), or one per site: attention, mlp, experts, "
      "embeddings, stages, and gradients and weights between data-parallel ranks "
      "(gradients=int4:g32,weights=lossless,stages=int8; parallel.codec)");
  add_device_options(command, arguments.devices);
}

constexpr const char* kFooter = R"(
Keys of the job file: tandem train --help TABLE, such as tandem train --help optimizer.

Ranks are threads of this process, or under mpirun, torchrun or srun their processes.
Ctrl-C (SIGINT), SIGTERM or SIGHUP ends the run after the current step, with a checkpoint; a
second one, more than a second later, ends it at once. mpirun gives its ranks one second for
that; for longer: mpirun --mca odls_base_sigkill_timeout 60. SIGUSR1 or SIGUSR2 saves a
checkpoint, and the run continues.

Examples:
  tandem train configs/tiny.toml --tp 2 --dp 2 --out out/tiny
  tandem train configs/moe.toml --dp 2 --ep 2 --out out/moe
  tandem train configs/tiny.toml --pp 2 --out out/stages --set train.microbatch=2
  tandem train configs/tiny.toml --tp 4 --out out/tiny --resume --set train.steps=100
  mpirun -n 2 tandem train configs/tiny.toml --tp 2 --out out/processes
  tandem train configs/tiny.toml --out out/own --set data.paths=include train.steps=200
  tandem train configs/tiny.toml --tp 2 --out out/traced --set trace.enabled=true
  tandem train configs/tiny.toml --out out/held --set data.val_fraction=0.3)";

}  // namespace

bool print_key_help(int argc, const char* const* argv) {
  const auto is_name = [](std::string_view word) {
    return std::ranges::all_of(word, [](char c) { return c >= 'a' && c <= 'z'; });
  };
  if (argc < 2 || argv[1] != std::string_view("train")) return false;
  for (int i = 2; i + 1 < argc; ++i) {
    const std::string_view word = argv[i];
    if ((word != "--help" && word != "-h") || !is_name(argv[i + 1])) continue;
    print_keys(argv[i + 1]);
    return true;
  }
  return false;
}

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a model on text");
  auto arguments = std::make_shared<TrainArguments>();
  command
      ->set_help_flag(
          "-h,--help",
          fmt::format("Print this help, or the keys of a table of the job file: {}; {}: all",
                      fmt::join(key_tables(), ", "), kAllKeys))
      ->option_text("[TABLE]");
  add_run_options(*command, *arguments);
  add_layout_options(*command, *arguments);
  command->option_defaults()->group("Watching and testing");
  command->add_option(
      "--live", arguments->live,
      "Serve a page of the run while it trains (tandem report OUT --live does so later)");
  command->add_option(
      "--inject", arguments->inject,
      "Inject faults, for tests (TOML): kill, hang or slow ranks, flip bits, fail writes");
  command->footer(kFooter);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
