#include "engine/train/run.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "core/system/files.h"
#include "core/system/machine.h"
#include "core/system/process/clock.h"
#include "engine/checkpoint/loading.h"
#include "engine/checkpoint/run/made_by.h"
#include "engine/checkpoint/run/run_end.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/plan/cost/memory.h"
#include "engine/train/run_start.h"
#include "observe/recorder.h"
#include "overlap/contract/receipt.h"

namespace tandem {

Run::Run(Communicator& of_run, const TrainRequest& of_ranks, const TokenSource& text)
    : world(of_run),
      request(check_request(of_run, of_ranks, text)),
      threads(threads_per_rank(of_run.size())),
      config(of_ranks.config),
      source(text),
      sampler(text, config.train.seq, uint64_t(config.train.seed),
              make_sampler_options(config.data)),
      groups(of_run, ParallelDims(config.parallel), config.model.experts > 0) {
  clear_receipts();
  config.data.format = source.format();
  config.parallel.replicas = config.parallel.logical_replicas();
  if (world.rank() == 0) progress.emplace(request.log);
  if (!request.resume) find_init();
  memory.emplace(world, open_output());
  ResumePoint begin_at;
  if (request.resume) {
    begin_at =
        find_resume_point(world, *memory, files ? &*files : nullptr, config.model.parameters());
    if (begin_at.is_start()) find_init();
  }
  note_lines(describe_run(config.model, config.data, config.train, source, sampler));
  resolve_dtype(begin_at);
  note(MemoryEstimate(config, groups.on_gpus()).describe());
  ranks.emplace(groups, config, request.routed);
  executor.emplace(config.train, config.parallel, groups, source, sampler, *ranks);
  trained.emplace(trained_ranks());
  begin(begin_at);
  executor->load(state.next_sample);  // under what precedes the first step
  measured_peak = !request.rank_flops || *request.rank_flops <= 0;
  utilization = measure_utilization(world, config, request.rank_flops);
  if (measured_peak) note_lines(utilization.describe(config));
  note(ranks->describe_state());
  make_checkpoints();
  phase_log.emplace(config.trace, request.out + "/ranks", groups, state.step);
  elapsed_before_s = state.elapsed_s;
}

void Run::open_logs() {
  on_output("room on disk", [&] { files->check_room(state.step, memory->restored() >= 0); });
  if (files) files->open_logs(ledger_start(state, config.parallel, config.train, sampler));
}

void Run::find_init() {
  init_from = find_initial_model(world, request.init, config.model,
                                 [this](const std::string& text) { note(text); });
}

/// Opens the files of the run.
SnapshotOwner Run::open_output() {
  const std::string run = on_rank_zero(world, "opening the output", [&] {
    files.emplace(request.out, request.resume, config, source, *progress,
                  request.output_patience_s);
    if (request.output_opened) request.output_opened();
    return files->run_id();
  });
  return {run, describe_layout(config.parallel, config.model.layers, groups.on_gpus()),
          world.rank(), world.size()};
}

/// Resolves dtype "auto", in a resumed run to the dtype of its start, and writes the effective
/// settings to OUT/config.toml.
void Run::resolve_dtype(const ResumePoint& from) {
  const std::string choice =
      choose_run_dtype(world, config, from.is_start() ? "" : from.state().config);
  if (!choice.empty()) note(choice);
  on_output("writing the configuration", [&] { files->write_configuration(); });
}

/// Sets weights, optimizer and state: initial ones, or those of snapshots or of a checkpoint.
namespace {

/// Adapts what a checkpoint's state says of the run until then to keys that have changed since.
void adapt_control(const RunConfig& train, const OptimizerConfig& optimizer, TrainState& state) {
  TrainConfig before;
  try {
    before = parse_config(state.config, "state.json");
  } catch (const ConfigError&) {  // of another version
    return;
  }
  // final/ has other weights than those of the lowest loss so far.
  if (train.save_best && !before.train.save_best) {
    state.control.validations_since_lowest = -1;
  }
  // A shorter warm-up that is over ended where nothing was noted: after its share of the steps.
  const int64_t warmup = optimizer.warmup;
  if (warmup >= state.step || warmup == before.optimizer.warmup) return;
  const double share = double(warmup) / double(state.step);
  state.warmup_s = share * state.elapsed_s;
  state.control.warmup_tokens = std::llround(share * double(state.control.tokens));
}

}  // namespace

void Run::begin(const ResumePoint& from) {
  if (const auto restored =
          restore(*trained, *memory, from, files ? &*files : nullptr, config.model.parameters())) {
    state = *restored;
    seek_streams(world, request.out + "/ledger.jsonl", state.next_sample, sampler);
    if (state.control.tokens < 0) state.control.tokens = count_targets(sampler, state.next_sample);
    adapt_control(config.train, config.optimizer, state);
  } else {
    if (!init_from.empty()) {
      load_model(*trained, init_from);
    } else {
      for (ModelChunk& chunk : ranks->chunks) {
        chunk.stage.initialize(uint64_t(config.train.seed));
        chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
      }
    }
    state.seq = config.train.seq;
    state.seed = config.train.seed;
    state.data = source.fingerprint();
  }
  for (ModelChunk& chunk : ranks->chunks) chunk.stage.end_staging();
  executor->weights_changed();
  state.config = config.to_toml();
  state.made_by = build_identity();
}

TrainedRanks Run::trained_ranks() {
  std::vector<TrainedStage> stages;
  for (ModelChunk& chunk : ranks->chunks) stages.push_back({chunk.stage, chunk.optimizer});
  return {world,
          describe_layout(config.parallel, config.model.layers, groups.on_gpus()),
          groups.tp(),
          std::move(stages),
          groups.dims().learner(world.rank()),
          groups.dims().learners(),
          outer_moments(config.parallel.sync)};
}

void Run::make_checkpoints() {
  checkpoints.emplace(
      *trained,
      RunCheckpoints::Options{.out = request.out,
                              .model = config.model,
                              .schedule = CheckpointSchedule(config.checkpoint),
                              .keep = config.checkpoint.keep,
                              .memory = &*memory,
                              .peers = config.checkpoint.peer_copy ? &groups.copies() : nullptr,
                              .prepare = [this] { files->prepare_checkpoint(); }},
      state);
  if (const size_t bytes = checkpoints->snapshot_bytes(); bytes > 0) {
    note(fmt::format("checkpoints: {} of snapshots in the memory of this rank",
                     format_bytes(double(bytes))));
  }
}

void Run::note(const std::string& text) {
  if (progress) progress->note(text);
}

void Run::note_lines(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) note(line);
}

void Run::note_warnings() {
  for (const std::string& text : checkpoints->take_warnings()) note("warning: " + text);
}

bool Run::is_finished() const {
  return !describe_end(state, config.train).empty();
}

bool Run::validates() const {
  const int64_t every = config.train.validate_every;
  return every > 0 && (state.step % every == 0 || is_finished());
}

const std::string& Run::failure() const {
  return executor->read_error().empty() ? ending.error : executor->read_error();
}

std::string Run::save_now() {
  const ScopedSpan span(SpanKind::checkpoint, "checkpoint");
  executor->await_weights();
  std::string unsaved = checkpoints->save_now(state);
  note_warnings();
  return unsaved;
}

bool Run::has_final() {
  const std::string there = on_rank_zero(world, "looking for the final model", [&] {
    return path_exists(request.out + "/final/config.json") ? "yes" : "no";
  });
  return there == "yes";
}

void Run::write_final() {
  on_output("the folder of the run", [&] { files->require_output(); });
  save_final(*trained, LiveState(*trained), request.out, state, config.model,
             parse_dtype(config.checkpoint.export_dtype));
}

double Run::elapsed_s() const {
  return elapsed_before_s + seconds_since(start);
}

}  // namespace tandem
