#include "engine/train/run_start.h"

#include <fmt/format.h>

#include <string_view>
#include <variant>

#include "comm/exec.h"
#include "core/system/files.h"
#include "engine/checkpoint/run/same_run.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/config/device_traits.h"
#include "engine/config/gpu_training.h"
#include "engine/data/stream/shard_stream.h"
#include "engine/optim/learning_rate.h"
#include "engine/parallel/agreement.h"
#include "engine/parallel/collective_check.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/sharded/buckets.h"
#include "engine/plan/codecs/auto_dtype.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem {

const TrainRequest& check_request(Communicator& world, const TrainRequest& request,
                                  const TokenSource& source) {
  if (!device_traits(make_exec(world)).is_host) {
    check_gpu_training(request.config, world.transport() == "one_gpu");
  }
  world.require_same("configuration", request.config.to_toml());
  world.require_same("--resume", request.resume ? "yes" : "no");
  world.require_same("--out", request.out);
  world.require_same("--init", request.init);
  world.require_same("--inject", request.faults.text());
  require_same_location(world, "--out", request.out);
  world.require_same("the training text", source.identity());
  return request;
}

std::vector<std::string> describe_run(const ModelConfig& model, const DataConfig& data,
                                      const RunConfig& train, const TokenSource& source,
                                      const Sampler& sampler) {
  std::vector<std::string> lines;
  for (const std::string& change : source.notes()) lines.push_back("data.paths: " + change);
  const std::string windows =
      sampler.windows() > 0 ? fmt::format("{} windows", sampler.windows()) : "windows";
  lines.push_back(fmt::format("{:.2f} M parameters; {}; {} of {}", double(model.parameters()) / 1e6,
                              source.describe(), windows, train.seq));
  if (const auto padding = sampler.padding()) {
    lines.push_back(fmt::format("data.packing {}: {:.2f} % of the positions are padding",
                                data.packing, 100 * *padding));
  }
  if (train.batch_start > 0) {
    lines.push_back(fmt::format("the batch grows from {} to {} by {} at a time over {} samples",
                                train.batch_start, train.batch, train.batch_increment,
                                train.batch_rampup_samples));
  }
  return lines;
}

std::string describe_layout(const ParallelConfig& parallel, int64_t num_layers, bool on_gpu) {
  std::string layout = fmt::format("{} with buckets of {} MiB", ParallelDims(parallel).describe(),
                                   bucket_mib(parallel, on_gpu));
  if (parallel.pp == 1) return layout;
  layout += " and stages of";
  for (const StageLayers& stage : pipeline_layers(parallel, num_layers))
    layout += fmt::format(" {}", stage.count);
  return layout + " layers";
}

std::string describe_peak(const Exec& exec) {
  return fmt::format("peak memory: {} in {}", format_bytes(double(memory_in_use(exec))),
                     device_traits(exec).memory);
}

std::string find_initial_model(Communicator& world, const std::string& init,
                               const ModelConfig& model,
                               const std::function<void(const std::string&)>& note) {
  if (init.empty()) return "";
  return on_rank_zero(
      world, "opening the model to start from",
      [&] {
        const StoredModel stored = open_model(init, note);
        require_same_model(init, stored.config, model);
        note(fmt::format("starting from the weights of {}", stored.directory));
        return stored.directory;
      },
      uint64_t(4 * model.parameters()));
}

std::string choose_run_dtype(Communicator& world, TrainConfig& config, const std::string& resumed) {
  if (config.train.dtype != "auto") return "";
  if (!resumed.empty()) {
    config.train.dtype = parse_config(resumed, "state.json").train.dtype;
    return fmt::format("train.dtype auto: {}, as this run began", config.train.dtype);
  }
  const DTypeChoice choice = choose_dtype(world, config.model, config.parallel.tp,
                                          microbatch_tokens(config.parallel, config.train));
  config.train.dtype = name_of(choice.dtype);
  return choice.describe();
}

std::vector<std::string> describe_streams(const TokenSource& source) {
  std::vector<std::string> lines;
  for (const WeightedSource& component : source.components()) {
    const ShardStream* stream = component.source->stream();
    if (!stream) continue;
    lines.push_back(fmt::format("stream of {}: {} shards opened", component.source->describe(),
                                stream->opened_shards()));
  }
  return lines;
}

double next_learning_rate(const OptimizerConfig& optimizer, const RunConfig& train,
                          const TrainState& state, double elapsed_s) {
  const bool by_tokens = train.tokens > 0;
  const ControlState& control = state.control;
  return learning_rate(optimizer, train, state.step, by_tokens ? double(control.tokens) : elapsed_s,
                       by_tokens ? double(control.warmup_tokens) : state.warmup_s);
}

int64_t count_targets(const Sampler& sampler, int64_t end) {
  int64_t targets = 0;
  for (int64_t sample = 0; sample < end; ++sample) targets += sampler.targets(sample);
  return targets;
}

namespace {

/// Line of the last step that ends at or before the sample.
std::string find_cursors(const std::string& ledger, int64_t next_sample) {
  if (!path_exists(ledger)) return "";
  const std::string text = read_file(ledger);
  for (std::string_view rest = text; !rest.empty();) {
    if (rest.ends_with('\n')) rest.remove_suffix(1);
    const size_t begin = rest.rfind('\n') + 1;  // 0 without a newline
    const std::string_view line = rest.substr(begin);
    rest = rest.substr(0, begin);
    try {
      const LedgerLine parsed = parse_ledger_line(line);
      const auto* step = std::get_if<LedgerStep>(&parsed.record);
      if (step && step->end() <= next_sample) return std::string(line);
    } catch (const IoError&) {  // incomplete, or `tandem data check` names it
    }
  }
  return "";
}

}  // namespace

void seek_streams(Communicator& world, const std::string& ledger, int64_t next_sample,
                  const Sampler& sampler) {
  if (sampler.windows() > 0) return;
  const std::string line =
      on_rank_zero(world, "reading the ledger", [&] { return find_cursors(ledger, next_sample); });
  if (line.empty()) return;
  sampler.seek(std::get<LedgerStep>(parse_ledger_line(line).record).cursors);
}

LedgerStart ledger_start(const TrainState& state, const ParallelConfig& parallel,
                         const RunConfig& train, const Sampler& sampler) {
  LedgerStart start{
      state.step,        state.next_sample, state.data,  sampler.windows(),
      state.seq,         state.seed,        parallel.dp, microbatch_size(parallel, train),
      parallel.replicas, sampler.sources()};
  if (start.sources.size() == 1) start.sources.clear();
  return start;
}

}  // namespace tandem
