// Fragments of a model that learners exchange in turn (Streaming DiLoCo, arXiv 2501.18512, section
// 2.2): which parameters, and in which steps. Pure functions of the model's list of parameters and
// of the job, the same at every layout of the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/parameter.h"
#include "engine/parallel/sync/config.h"

namespace tandem {

/// Fragment of each parameter: consecutive ones of about equally many elements.
std::vector<int> assign_fragments(std::span<const Parameter> list, int64_t fragments);

/// Fragment that is sent after `step`, counted from 1: fragment p after the steps that are
/// p x every / fragments modulo `every`.
std::optional<int> fragment_due(const SyncConfig& config, int64_t step);

/// Exchange that began after a step.
struct SentFragment {
  int fragment = 0;
  int64_t step = 0;
};
/// Exchange that runs after `step`: begun, and applied only after a later one.
std::optional<SentFragment> fragment_in_flight(const SyncConfig& config, int64_t step);

}  // namespace tandem
