// Pictures of a pipeline schedule: a row per rank, time to the right.
#pragma once

#include <string>
#include <vector>

#include "schedule/pipeline.h"
#include "schedule/pipeline_simulation.h"

namespace tandem {

/// Schedule with the times of its passes, all of them executed.
struct PlannedSchedule {
  schedule::PipelineShape shape;
  schedule::PassCosts costs;
  std::vector<std::vector<schedule::PipelineAction>> actions;  ///< of every rank
  schedule::PipelineTimes times;

  int peak_activations() const;  ///< of the rank with the most
};

/// Picture for a terminal of at most `max_columns`, with its key; a note instead if it is wider.
std::string schedule_text(const PlannedSchedule& plan, int max_columns);
std::string schedule_svg(const PlannedSchedule& plan);

}  // namespace tandem
