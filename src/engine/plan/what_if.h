// Page that shows how the fastest layout of a job changes with GPUs, links, memory and accuracy.
//
// Kernels' seconds, bytes over each link and memory of every layout are computed here; the page
// divides bytes by the links' rates, chooses wire formats and adds up the step
// (page/what_if_model.js). Its steps, layouts and memory are those of LayoutSearch with such a
// hardware file.
#pragma once

#include <functional>
#include <string>

#include "engine/plan/layout_search.h"

namespace tandem::plan {

struct WhatIfParams {
  std::string name;
  double gpus = 0;    ///< shown first; a quarter, half, twice and four times as many may be chosen
  Factors factors{};  ///< of every layout
  LayoutLimits limits;     ///< shown first
  size_t max_rows = 1500;  ///< of a number of GPUs: the fastest
};

/// Whether a layout without wire formats can run; others are left out.
using CanRun = std::function<bool(const Layout&)>;

/// One HTML file with everything in it. Throws InvalidArgument if no layout divides the job.
std::string what_if_page(const LayoutSearch& search, const WhatIfParams& params,
                         const CanRun& can_run);

}  // namespace tandem::plan
