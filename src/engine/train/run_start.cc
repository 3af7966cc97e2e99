#include "engine/train/run_start.h"

#include <fmt/format.h>

#include "engine/parallel/buckets.h"
#include "engine/parallel/pipeline.h"

namespace tandem {

std::vector<std::string> describe_run(const TrainConfig& config, const TokenSource& source,
                                      const Sampler& sampler) {
  std::vector<std::string> lines;
  for (const std::string& change : source.notes()) lines.push_back("data.paths: " + change);
  lines.push_back(fmt::format("{:.2f} M parameters; {}; {} windows of {}",
                              double(config.model.parameters()) / 1e6, source.describe(),
                              sampler.windows(), config.train.seq));
  if (const auto padding = sampler.padding()) {
    lines.push_back(fmt::format("data.packing {}: {:.2f} % of the positions are padding",
                                config.data.packing, 100 * *padding));
  }
  const auto& train = config.train;
  if (train.batch_start > 0) {
    lines.push_back(fmt::format("the batch grows from {} to {} by {} at a time over {} samples",
                                train.batch_start, train.batch, train.batch_increment,
                                train.batch_rampup_samples));
  }
  return lines;
}

std::string describe_layout(const ParallelDims& dims, const TrainConfig& config, bool on_gpu) {
  std::string layout =
      fmt::format("{} with buckets of {} MiB", dims.describe(), bucket_mib(config, on_gpu));
  if (dims.pp() == 1) return layout;
  layout += " and stages of";
  for (const StageLayers& stage : pipeline_layers(config))
    layout += fmt::format(" {}", stage.count);
  return layout + " layers";
}

int64_t count_targets(const Sampler& sampler, int64_t end) {
  int64_t targets = 0;
  for (int64_t sample = 0; sample < end; ++sample) targets += sampler.targets(sample);
  return targets;
}

LedgerStart ledger_start(const TrainState& state, const TrainConfig& config,
                         const Sampler& sampler) {
  LedgerStart start{state.step,
                    state.next_sample,
                    state.data,
                    sampler.windows(),
                    state.seq,
                    state.seed,
                    config.parallel.dp,
                    microbatch_size(config),
                    config.parallel.replicas,
                    sampler.sources()};
  if (start.sources.size() == 1) start.sources.clear();
  return start;
}

}  // namespace tandem
