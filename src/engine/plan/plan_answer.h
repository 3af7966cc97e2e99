// Answer to a plan: tokens a second, MFU, days and cost of a layout, and how sure they are.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "engine/plan/fit/error_bar.h"
#include "engine/plan/layout_search.h"

namespace tandem::plan {

struct AnswerParams {
  std::string name;     ///< of the model
  double gpus = 1;      ///< of all learners
  double learners = 1;  ///< the layout's step and batch are those of one
  double tokens = 0;    ///< to train on; 0: no days
  double price = 0;     ///< of a GPU for an hour; 0: no cost
};

struct PlanAnswer {
  AnswerParams params = {};
  std::string gpu = {};
  double step_s = 0, step_tokens = 0, memory_gib = 0;
  double tokens_per_s = 0;  ///< of all GPUs
  double flops_per_token = 0, peak_flops = 0, mfu = 0;
  double days = 0, cost = 0;
  std::optional<ErrorBar> bar = {};  ///< nothing: of runs of one source
  std::string untested = {};         ///< what no run has shown on this hardware
};

/// `runs`: those that the step cost was fitted to.
PlanAnswer make_answer(const AnswerParams& params, const Layout& layout, const GpuSpec& gpu,
                       std::span<const RunRow> runs);

/// Seven lines at most.
std::string describe(const PlanAnswer& answer);

}  // namespace tandem::plan
