// `tandem plan CONFIG`: the fastest layout of a job on given GPUs.
#pragma once

#include <string>

namespace tandem {

struct PlanSearchOptions {
  std::string config, hardware, out;
  std::string init;  ///< folder of the model to start from; empty: the job's
  double gpus = 0;
  std::string fit;  ///< CSV file of runs that the step cost is calibrated on; empty: priors
  std::string accuracy = "lossless";  ///< plan::parse_accuracy
  bool dp_formats = false;            ///< of gradients and weights, too
  std::string json;                   ///< file, "-" or empty
  std::string chakra;                 ///< folder of plan::chakra_trace
  std::string page;                   ///< HTML file of plan::what_if_page
};

/// Searches, prints the layouts that are best in time or memory, and writes a job file. Throws
/// InvalidArgument if nothing fits.
void plan_layout(const PlanSearchOptions& options);

}  // namespace tandem
