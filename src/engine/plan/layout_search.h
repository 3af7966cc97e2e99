// Search for the layout of a job that takes the shortest step within the memory of its GPUs.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config/config.h"
#include "engine/plan/cost/learner_exchange.h"
#include "engine/plan/fit/calibration.h"
#include "engine/plan/layout_formats.h"

namespace tandem::plan {

/// A layout of the job: its row, ZeRO stage and wire formats, the predicted step and the peak
/// memory of a rank.
struct Layout {
  RunRow row;
  LayoutFormats formats;
  double error = 0;  ///< error_of the formats
  StepTime time;
  double memory_gib = 0;
  LearnerExchange exchange = {};
};

struct FoundLayouts {
  std::vector<Layout>
      fitting;  ///< that no layout with the same row beats; fastest first, then smallest
  size_t considered = 0, num_fitting = 0;
  Layout smallest;  ///< of least memory among all
};

/// Factors of the step cost for a row.
using FactorsOf = std::function<Factors(const RunRow&)>;

struct LayoutLimits {
  double memory_share = .92;  ///< of the GPU's memory
  double max_error = 0;       ///< of a site's wire format (parse_accuracy)
  /// Formats of gradients and weights, too, which only CPU ranks take.
  bool dp_formats = false;
  /// Ranks that divide a sequence; above 1 layouts with context parallelism are tried, too.
  double max_cp = 1;
};

/// Layouts of one job on GPUs of one kind.
class LayoutSearch {
 public:
  /// Both must outlive this object.
  LayoutSearch(const TrainConfig& config, const GpuSpec& gpu) : config_(config), gpu_(gpu) {}

  /// Tries TP within a host, CP up to limits.max_cp, PP with each schedule but gpipe, EP,
  /// microbatch, recomputation, ZeRO stage and the wire formats of every site on `gpus` GPUs, for
  /// the model, batch and window of the job, in bf16. Rows are always divided over TP (sequence
  /// parallelism), as the engine does. Throws InvalidArgument if no layout divides the job. Of
  /// learners, `gpus` and rows are those of one, with its share of the batch; all have the same
  /// layout.
  ///
  /// For each bound of the error every site has its fastest format: a step is no slower if an
  /// exchange is faster, and formats of TP, EP and PP take no memory. Those of gradients and
  /// weights do, so none, an exact and a lossy one are tried.
  FoundLayouts find(double gpus, const FactorsOf& factors, const LayoutLimits& limits = {}) const;
  /// Rows of all layouts that divide the job, whatever their memory: those that `find` tries.
  std::vector<RunRow> rows(double gpus, double max_cp = 1) const;
  /// The job in a layout. It is checked as a job file is: throws ConfigError if an operator cannot
  /// run it.
  TrainConfig config_in(const Layout& layout) const;

  const ModelConfig& model() const { return config_.model; }
  const SyncConfig& sync() const { return config_.parallel.sync; }
  const GpuSpec& gpu() const { return gpu_; }

 private:
  RunRow row_without_layout(double gpus) const;

  const TrainConfig& config_;
  const GpuSpec& gpu_;
};

/// ZeRO stages that the search considers for a row, the first one always.
std::vector<int> searched_stages(const RunRow& row, const ModelConfig& model,
                                 const SyncConfig& sync);
/// Sums of a layer's forward pass, of two, that may have a format.
double formatted_sums(const ModelConfig& model);

/// Parts of a step by name; they add up to its time.
struct NamedSeconds {
  std::string_view name;
  double seconds;
};
std::array<NamedSeconds, 12> terms_of(const StepTime& time);

/// Wire formats that the search considers, exact ones first: of gradients and weights, or of the
/// other sites.
std::vector<Wire> searched_formats(bool of_dp);

/// Layouts that no other beats in step time, memory and error, fastest first.
std::vector<Layout> pareto_front(const std::vector<Layout>& fastest_first);

/// Largest parts of the step in which `layout` takes longer than `best`: "bubble +12 ms, tp +3 ms".
std::string reasons_to_lose(const Layout& layout, const Layout& best);

}  // namespace tandem::plan
