#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/help.h"
#include "comm/rendezvous/launch.h"
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
  int ranks = 0, tp = 0, dp = 0, ep = 0, pp = 0;
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

/// Keeps the logical replicas and their bits with fewer data-parallel ranks.
void set_dp(TrainConfig& config, int dp) {
  auto& parallel = config.parallel;
  if (dp == 0 || dp == parallel.dp) return;
  parallel.replicas = config.parallel.logical_replicas();
  parallel.dp = dp;
  check_config(config);
  MemoryEstimate(config).check();
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
  auto& parallel = request.config.parallel;
  if (arguments.tp > 0) parallel.tp = arguments.tp;
  if (arguments.dp > 0) parallel.dp = arguments.dp;
  if (!arguments.codec.empty()) parallel.codec = CodecPolicy::parse(arguments.codec).describe();
  if (arguments.ep > 0) parallel.ep = arguments.ep;
  if (arguments.pp > 0) parallel.pp = arguments.pp;
  if (arguments.ranks > 0) {
    const int64_t replica = parallel.tp * parallel.pp;
    if (arguments.dp == 0 && arguments.ranks % replica == 0) {
      parallel.dp = arguments.ranks / replica;
    }
    if (replica * parallel.dp != arguments.ranks) {
      throw InvalidArgument(fmt::format("--ranks {}: expected tp x dp x pp = {} x {} x {} = {}",
                                        arguments.ranks, parallel.tp, parallel.dp, parallel.pp,
                                        replica * parallel.dp));
    }
  }
  if (request.config.check.action == "replace" && !member) {
    throw InvalidArgument(
        "check.action is replace: expected tandem launch --spares, --restarts or --min-dp, which "
        "replace a rank");
  }
  if (member && arguments.devices.on_gpus()) {
    throw Unsupported("--device gpu under tandem launch --spares: expected --device cpu");
  }
  if (request.resume) {
    const std::string note = keep_replicas(request.out, request.config);
    if (!note.empty() && speaks()) complain("note: " + single_line(note));
  }
  check_config(request.config);
  WorldOptions world;
  world.ranks = ParallelDims(request.config.parallel).ranks();
  if (!parallel.link.empty()) world.link = EmulatedLink::parse(parallel.link);
  const auto check_gpus = [&] {
    check_gpu_training(request.config, arguments.devices.ranks_per_gpu > 1);
    return MemoryEstimate(request.config, true).largest_rank(false).total();
  };
  if (arguments.devices.on_gpus()) check_gpus();
  set_devices(arguments.devices, world,
              {member ? "tandem launch --spares, --restarts or --min-dp" : "", check_gpus});
  MemoryEstimate(request.config, arguments.devices.on_gpus()).check();
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
  if (member) {
    request.output_opened = [member] { member->note_output(); };
    request.output_patience_s = kOutputPatienceS;
    request.rank_flops = &member->rank_flops();
    request.before_step = [member](int64_t step) { member->note_step(step); };
    request.leave_corrupt = [member] { member->leave_corrupt(); };
    member->note_layout(int(parallel.tp), int(parallel.dp), int(parallel.pp), int(parallel.ep));
    const bool trained = run_recovering(*member, [&] {
      request.resume |= member->resumes();
      set_dp(request.config, member->dp());
      world.ranks = ParallelDims(request.config.parallel).ranks();
      train_ranks();
      member->note_step(end.step);  // also of a run in which no step was left
    });
    if (!trained) return;
  } else {
    train_ranks();
  }
  if (end.stopped) throw Ended{kStopped};
}

std::string wrapped_keys() {
  constexpr size_t kName = 31, kColumn = kName + 2;
  std::istringstream lines(describe_config_keys());
  std::string text;
  for (std::string line; std::getline(lines, line);) {
    text += "  " + line.substr(0, kName) + wrapped(line.substr(kName), kColumn, kColumn) + "\n";
  }
  return text;
}

}  // namespace

void add_train(CLI::App& app) {
  auto* command = app.add_subcommand("train", "Train a model on text");
  auto arguments = std::make_shared<TrainArguments>();
  command->add_option("config", arguments->config, "Job file (TOML)")->required();
  command->add_option("--out", arguments->out, "Directory for metrics, checkpoints and the model")
      ->required();
  command
      ->add_option("--ranks", arguments->ranks,
                   "All ranks; without --dp, data parallel is ranks / (tp x pp)")
      ->check(CLI::Range(1, 4096));
  add_device_options(*command, arguments->devices);
  command->add_option("--tp", arguments->tp, "Tensor parallel ranks (parallel.tp)")
      ->check(CLI::Range(1, 4096));
  command->add_option(
      "--codec", arguments->codec,
      "What sums over tensor-parallel ranks travel as (int8), or by site: attention, "
      "mlp, experts, embeddings, gradients and weights between data-parallel ranks, and stages "
      "(gradients=int4:g32,weights=lossless,stages=int8; parallel.codec)");
  command->add_option("--dp", arguments->dp, "Data parallel ranks (parallel.dp)")
      ->check(CLI::Range(1, 4096));
  command->add_option("--pp", arguments->pp, "Pipeline parallel ranks (parallel.pp)")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--ep", arguments->ep,
                   "Of the data parallel ranks, those that share the experts (parallel.ep)")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--set", arguments->overrides,
                   "table.key=value over the job file, one or several; each value is TOML, or else "
                   "a string")
      ->allow_extra_args(false)
      ->take_all();
  command->add_flag("--resume", arguments->resume,
                    "Go on from the newest valid checkpoint in --out, or from newer snapshots in "
                    "memory that tandem launch holds");
  command->add_option(
      "--init", arguments->init,
      "Start from this model, a Hugging Face folder or what train left: its "
      "weights, keys, tokenizer and chat template, and optimizer.lr 2e-5 unless the "
      "job has another; moments are zero, the step is 0");
  command->add_option(
      "--inject", arguments->inject,
      "For tests: faults to inject (TOML): kill, hang, slow ranks, flip bits, failing writes");
  command->add_option("--live", arguments->live,
                      "Serve a page of the run while it trains, at [HOST:]PORT (as tandem report "
                      "OUT --live does, which may also be started later)");
  command->footer(
      "\nKeys of the job file:\n" + wrapped_keys() +
      "\nRanks are threads of this process, or under mpirun, torchrun or srun their processes."
      "\nCtrl-C (SIGINT), SIGTERM or SIGHUP ends the run after the step at hand, with a "
      "checkpoint;"
      "\na second one, more than a second later, ends it at once. mpirun gives its ranks one "
      "second for that;"
      "\nfor longer: mpirun --mca odls_base_sigkill_timeout 60. SIGUSR1 or SIGUSR2 saves a "
      "checkpoint,"
      "\nand the run goes on."
      "\n\nExamples:"
      "\n  tandem train configs/tiny.toml --tp 2 --dp 2 --out out/tiny"
      "\n  tandem train configs/moe.toml --dp 2 --ep 2 --out out/moe"
      "\n  tandem train configs/tiny.toml --pp 2 --out out/stages --set train.microbatch=2"
      "\n  tandem train configs/tiny.toml --tp 4 --out out/tiny --resume "
      "--set train.steps=100"
      "\n  mpirun -n 2 tandem train configs/tiny.toml --tp 2 --out out/processes"
      "\n  tandem train configs/tiny.toml --out out/own --set data.paths=include "
      "train.steps=200"
      "\n  tandem train configs/tiny.toml --tp 2 --out out/traced "
      "--set trace.enabled=true"
      "\n  tandem train configs/tiny.toml --out out/held --set data.val_fraction=0.3");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
