// Search for the layout of a job that takes the shortest step within the memory of its GPUs.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/plan/calibration.h"

namespace tandem::plan {

/// A layout of the job: its row, the predicted step and the peak memory of a rank.
struct Layout {
  RunRow row;
  StepTime time;
  double memory_gib = 0;
};

struct LayoutSearch {
  std::vector<Layout> fitting;  ///< fastest first
  size_t considered = 0;
  Layout smallest;  ///< of least memory among all
};

/// Factors of the step cost for a row.
using FactorsOf = std::function<Factors(const RunRow&)>;

/// Tries TP within a host, PP with and without interleaving, EP, microbatch and recomputation on
/// `gpus` GPUs, for the model, batch and window of the configuration, in bf16 with ZeRO-1. At most
/// `memory_share` of the GPU's memory may be used. Throws InvalidArgument if no layout divides the
/// job.
LayoutSearch search_layouts(const TrainConfig& base, double gpus, const GpuSpec& gpu,
                            const FactorsOf& factors, double memory_share = .92);

/// The job in a layout. It is checked as a job file is: throws ConfigError if an operator cannot
/// run it.
TrainConfig config_in_layout(const TrainConfig& base, const Layout& layout);

/// Layouts that no other beats in both step time and memory, fastest first.
std::vector<Layout> pareto_front(const std::vector<Layout>& fastest_first);

/// Largest parts of the step in which `layout` takes longer than `best`: "bubble +12 ms, tp +3 ms".
std::string reasons_to_lose(const Layout& layout, const Layout& best);

}  // namespace tandem::plan
