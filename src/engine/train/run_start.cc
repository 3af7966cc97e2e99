#include "engine/train/run_start.h"

#include <fmt/format.h>

#include <string_view>
#include <variant>

#include "core/files.h"
#include "engine/parallel/buckets.h"
#include "engine/parallel/pipeline.h"
#include "tandem/error.h"

namespace tandem {

std::vector<std::string> describe_run(const TrainConfig& config, const TokenSource& source,
                                      const Sampler& sampler) {
  std::vector<std::string> lines;
  for (const std::string& change : source.notes()) lines.push_back("data.paths: " + change);
  const std::string windows =
      sampler.windows() > 0 ? fmt::format("{} windows", sampler.windows()) : "windows";
  lines.push_back(fmt::format("{:.2f} M parameters; {}; {} of {}",
                              double(config.model.parameters()) / 1e6, source.describe(), windows,
                              config.train.seq));
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

void seek_cursors(const std::string& line, const Sampler& sampler) {
  if (line.empty()) return;
  sampler.seek(std::get<LedgerStep>(parse_ledger_line(line).record).cursors);
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
