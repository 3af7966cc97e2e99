#include "cli/train_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/rendezvous/launch.h"
#include "comm/world/gpus.h"
#include "core/system/console.h"
#include "core/system/env.h"
#include "core/system/files.h"
#include "core/system/machine.h"
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
#include "engine/train/finetune.h"
#include "engine/train/trainer.h"

namespace tandem::cli {
namespace {

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
      "\nNext: {}\n"
      "      tandem eval {} {}",
      has_chats(format)
          ? fmt::format("tandem serve {}   # a page to chat, at http://127.0.0.1:8000/", folder)
          : fmt::format("tandem generate {} --prompt '#include <'", folder),
      folder,
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
void keep_replicas(TrainConfig& config, int dp) {
  config.parallel.replicas = config.parallel.logical_replicas();
  config.parallel.dp = dp;
  check_config(config);
}

void set_dp(TrainConfig& config, int dp, const DeviceOptions& devices) {
  const auto& parallel = config.parallel;
  if (dp == 0 || dp == parallel.dp) return;
  keep_replicas(config, dp);
  const bool is_alone = ParallelDims(parallel).ranks() == 1;
  check_memory(config, devices.on_gpus(), is_alone ? 1 : devices.ranks_per_gpu);
}

/// Throws ConfigError unless the job can continue with each number of data-parallel ranks that
/// losses may leave of it (launch --min-dp). Where those are on several hosts, their memory is not
/// known yet.
void check_fewer_replicas(TrainConfig fewer, int min_dp, const DeviceOptions& devices) {
  const ParallelConfig& parallel = fewer.parallel;
  if (min_dp == 0 || parallel.sync.num_learners() > 1) return;
  const int dp = int(parallel.dp), step = int(parallel.ep);
  const int ranks = ParallelDims(parallel).ranks();
  const bool is_one_host = ranks_here(ranks) == ranks;
  for (int left = dp - step; left >= min_dp; left -= step) {
    try {
      is_one_host ? set_dp(fewer, left, devices) : keep_replicas(fewer, left);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("launch --min-dp {}: with {} of {} data-parallel ranks: {}",
                                    min_dp, left, dp, error.what()));
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

/// The job of the command line, or of the run to resume. `notes`: lines for the user.
TrainConfig load_config_of_run(const TrainArguments& arguments, std::vector<std::string>* notes) {
  if (!arguments.finetune) {
    const std::string resumed = arguments.resume ? arguments.out : "";
    return load_run_config(arguments.config, arguments.overrides, arguments.init, resumed, notes);
  }
  FinetuneRequest request = *arguments.finetune;
  request.overrides = arguments.overrides;
  if (arguments.resume && path_exists(arguments.out + "/config.toml")) {
    return resume_finetune_config(request, arguments.out, notes);
  }
  return make_finetune_config(
      request, [&](ParallelConfig& parallel) { set_layout(arguments, parallel); }, notes);
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
  request.config = load_config_of_run(arguments, &notes);
  request.init = request.config.train.init;  // of a resumed run without a checkpoint, too
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

}  // namespace

void run_training(TrainArguments arguments) {
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
  if (member) check_fewer_replicas(request.config, member->min_dp(), arguments.devices);
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
      "embeddings, stages, gradients and weights between data-parallel ranks, and keys between "
      "context-parallel ranks (gradients=int4:g32,weights=lossless,stages=int8; parallel.codec)");
  add_device_options(command, arguments.devices);
}

}  // namespace tandem::cli
