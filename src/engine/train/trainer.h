// A training run from configuration to OUT/final, on TP x DP ranks.
//
// World rank r is tensor-parallel rank r mod tp of replica r / tp, so a tensor-parallel group is
// contiguous. Given steps (not seconds), everything that decides a result is a function of the
// configuration and the layout: two runs write bitwise equal weights, resumed or not.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "engine/config/config.h"
#include "engine/data/corpus.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

struct TrainRequest {
  TrainConfig config;
  std::string out;
  bool resume = false;
  std::FILE* log = stderr;  ///< rank 0 writes its lines to
  /// Once it is set on any rank, all finish the step at hand, save a checkpoint and return.
  const std::atomic<bool>* stop = nullptr;
  /// Counts requests for a checkpoint: once it has grown on any rank, all save one after the step
  /// at hand and go on.
  const std::atomic<int>* saves = nullptr;
  /// Called on every rank, in its thread, before each step, with the steps that are finished.
  std::function<void(int64_t step)> before_step = {};
  /// Called on every rank, in its thread, with what a router chose for its rows: scores f32 [rows,
  /// experts], chosen i32 [rows, top_k]. To compare runs by.
  std::function<void(int rank, int layer, const Tensor& scores, const Tensor& chosen)> routed = {};
};

/// How a run ended; the same on every rank.
struct TrainEnd {
  bool stopped = false;  ///< before its time, as `stop` asked: OUT/final is not written
  int64_t step = 0;
  double loss = NAN;       ///< of the last step, nats per token; NaN when it made none
  std::string checkpoint;  ///< the last one
};

/// Collective over a world of tp x dp ranks; every rank passes the same request. Writes, on rank 0,
/// OUT/{config.toml, heldout.txt, metrics.jsonl, checkpoints/, final/} and trace.json when asked.
/// Without `resume`, throws ConfigError when OUT already holds a run; so it does when another run
/// writes to OUT.
TrainEnd train(Communicator& world, const TrainRequest& request, const Corpus& corpus);

}  // namespace tandem
