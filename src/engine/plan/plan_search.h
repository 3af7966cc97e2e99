// `tandem plan MODEL|CONFIG|FOLDER`: the fastest layout of a job on given GPUs, and what it means.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

struct PlanSearchOptions {
  std::string subject;   ///< job file, published model, or folder of a model
  std::string hardware;  ///< plan::read_hardware
  std::string out;
  std::string init;  ///< folder of the model to start from; empty: the job's
  double gpus = 0;
  int64_t seq = 0, batch = 0;  ///< plan::TargetRequest
  double tokens = 0;           ///< length of the run; 0: the job's train.tokens
  double price = 0;            ///< of a GPU for an hour; 0: no cost
  bool all = false;            ///< more than the fastest layouts
  std::string fit;  ///< CSV file of runs that the step cost is calibrated on; empty: published ones
  std::string accuracy = "lossless";  ///< plan::parse_accuracy
  bool dp_formats = false;            ///< of gradients and weights, too
  int64_t max_cp = 1;                 ///< LayoutLimits::max_cp; of a job with more, those
  std::string json;                   ///< file, "-" or empty
  std::string chakra;                 ///< folder of plan::chakra_trace
  std::string page;                   ///< HTML file of plan::what_if_page
};

/// Searches, prints tokens a second, MFU, days and their error bar with the fastest layouts, and
/// writes a job file of the keys that differ from the defaults. Throws InvalidArgument if nothing
/// fits.
void plan_layout(const PlanSearchOptions& options);

}  // namespace tandem
