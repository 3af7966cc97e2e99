// Training run from configuration to OUT/final, on TP x DP x PP ranks.
//
// World rank r is tensor-parallel rank r mod tp of replica r / tp, so a tensor-parallel group is
// contiguous; pipeline stages are outermost (engine/parallel/dims.h). Given steps (not seconds),
// results depend only on the configuration and the layout, and not on the number of ranks that run
// the same logical replicas (parallel.replicas): two runs write bitwise equal weights, resumed or
// not.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>

#include "engine/config/config.h"
#include "engine/data/tokens/token_source.h"
#include "engine/train/checks/fault_plan.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

struct TrainRequest {
  TrainConfig config;
  std::string out;
  bool resume = false;
  std::string init;         ///< folder of a model whose weights to start from; not with `resume`
  FaultPlan faults = {};    ///< to inject; the same on every rank
  std::FILE* log = stderr;  ///< output of rank 0's messages
  /// If set on any rank, all ranks finish the current step, save a checkpoint and return.
  const std::atomic<bool>* stop = nullptr;
  /// Number of checkpoint requests: if there are some on any rank, it takes them, and all ranks
  /// save a checkpoint after the current step and continue.
  std::atomic<int>* saves = nullptr;
  /// If set: peak FLOP/s of a rank, measured unless an earlier call has set it. The same on every
  /// rank.
  std::atomic<double>* rank_flops = nullptr;
  /// Called on rank 0 once OUT is locked and belongs to this run.
  std::function<void()> output_opened = {};
  /// Seconds to wait for --out, which a process that has given up its rank may still hold.
  double output_patience_s = 1;
  /// Writes the newest snapshot in memory to disk, if it is newer than the checkpoints there, and
  /// ends without a step. With `resume`.
  bool only_saves = false;
  /// Begin of the time that train.max_seconds limits.
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  /// Called on every rank, in its thread, before each step, with the number of finished steps.
  std::function<void(int64_t step)> before_step = {};
  /// For check.action = "replace": called on a rank that is to be replaced; ends its process. The
  /// others throw Aborted. Without it, the run ends as for "stop".
  std::function<void()> leave_corrupt = {};
  /// Called on every rank, in its thread, with a router's choices for its rows: scores f32 [rows,
  /// experts], chosen i32 [rows, top_k]. For comparing runs.
  std::function<void(int rank, int layer, const Tensor& scores, const Tensor& chosen)> routed = {};
};

/// Result of a run; the same on every rank.
struct TrainEnd {
  /// Ended early by `stop`, train.max_seconds or `only_saves`: OUT/final is not written.
  bool stopped = false;
  int64_t step = 0;
  double loss = NAN;       ///< last step's, nats per token; NaN if no step ran
  std::string checkpoint;  ///< path of the last step's; empty if it was not saved
};

/// Collective over a world of tp x dp x pp ranks; every rank passes the same request. Writes, on
/// rank 0, OUT/{config.toml, heldout.txt, metrics.jsonl, checkpoints/, final/} and, if requested,
/// trace.json. Throws ConfigError if OUT already holds a run and `resume` is not set, or if another
/// run writes to OUT.
TrainEnd train(Communicator& world, const TrainRequest& request, const TokenSource& source);

}  // namespace tandem
