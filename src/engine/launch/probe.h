// Forms a world of many ranks on this machine, to measure how long that takes. A rank is what it is
// in training, its connection to the rendezvous store, its communication thread, its world and its
// groups, but without a model, and several share a process.
#pragma once

#include <cstdint>

namespace tandem {

struct ProbeRequest {
  int ranks = 1;
  int tp = 1, pp = 1;
};

struct ProbeResult {
  int processes = 0;      ///< that the ranks share
  double world_s = 0;     ///< from the start of the processes until the last rank is in the world
  double groups_s = 0;    ///< then, until every rank has used each of its groups
  double barrier_ms = 0;  ///< median of the world's barriers, of the rank that waits longest
  int64_t bytes_per_rank = 0;  ///< memory of all ranks and the store beyond that of the program
};

/// Each rank exchanges a number with its tensor-, data- and pipeline-parallel groups and compares
/// the members with those of ParallelDims. Throws InvalidArgument unless tp x pp divides the ranks;
/// Unsupported if the system does not allow as many files or threads; what the ranks throw.
ProbeResult probe_world(const ProbeRequest& request);

}  // namespace tandem
