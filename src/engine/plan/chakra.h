// Execution traces of a planned step in the format of MLCommons Chakra
// (schema/protobuf/et_def.proto of its repository), for simulators of clusters.
//
// A trace is the length-delimited messages GlobalMetadata and Node of a rank. Its passes are in the
// order of the pipeline schedule. A layer's pass is one node of its kernels, between one node of
// each exchange that it needs, in order (ctrl_deps); sends and receives of stages, and the sums of
// gradients, are tied to passes by data_deps. Durations are the step's predicted terms, so an
// exchange's is what the planner expects not to be hidden, and 0 at the receiver of a stage.
// Bubble, imbalance and jitter are waits and have no nodes.
#pragma once

#include <string>
#include <vector>

#include "engine/plan/layout_search.h"

namespace tandem::plan {

struct ChakraParams {
  Layout layout;
  GpuSpec gpu;
  Factors factors{};
  double formatted_sums = 2;  ///< formatted_sums of the model
};

/// Ranks that a layout's traces are written of: all, or of more than `max_ranks` the first of each
/// stage. The others of a stage differ only in their groups and in the ranks of their neighbours.
std::vector<int> chakra_ranks(const RunRow& row, int max_ranks = 64);

/// Trace of a rank: bytes of a file.
std::string chakra_trace(const ChakraParams& params, int rank);

/// Groups of these ranks: {"1": [0, 1], …}, by the text of an exchange's pg_name.
std::string chakra_groups(const RunRow& row, const std::vector<int>& ranks);

}  // namespace tandem::plan
