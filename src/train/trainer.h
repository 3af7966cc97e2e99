// A training run from configuration to OUT/final, on TP x DP ranks.
//
// World rank r is tensor-parallel rank r mod tp of replica r / tp, so a tensor-parallel group is
// contiguous. Given steps (not seconds), everything that decides a result is a function of the
// configuration and the layout: two runs write bitwise equal weights, resumed or not.
#pragma once

#include <string>

#include "tandem/communicator.h"
#include "train/config.h"
#include "train/corpus.h"

namespace tandem {

struct TrainRequest {
  TrainConfig config;
  std::string out;
  bool resume = false;
};

/// Collective over a world of tp x dp ranks; every rank passes the same request. Writes, on rank 0,
/// OUT/{config.toml, heldout.txt, metrics.jsonl, checkpoints/, final/} and trace.json when asked.
/// Without `resume`, throws ConfigError when OUT already holds a run.
void train(Communicator& world, const TrainRequest& request, const Corpus& corpus);

}  // namespace tandem
