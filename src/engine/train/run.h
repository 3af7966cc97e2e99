// A training run on a rank: what its steps and hooks share.
#pragma once

#include <chrono>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/world/host_ranks.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/checkpoint/saving.h"
#include "engine/checkpoint/snapshot/snapshot_memory.h"
#include "engine/data/sampler.h"
#include "engine/parallel/collective_check.h"
#include "engine/plan/cost/utilization.h"
#include "engine/report/progress.h"
#include "engine/train/model_ranks.h"
#include "engine/train/records/phase_log.h"
#include "engine/train/records/run_files.h"
#include "engine/train/resume_point.h"
#include "engine/train/step_executor.h"
#include "engine/train/trainer.h"
#include "gemm/gemm.h"

namespace tandem {

/// Why a run makes no further step; the same on every rank, except for `error`.
struct RunEnding {
  bool stops = false;   ///< a rank was asked to stop
  bool failed = false;  ///< a rank has an error
  std::string error;    ///< this rank's, of text or OUT
  std::string diverged;
  bool corrupt = false;  ///< a check found data that changed

  bool is_set() const { return stops || failed || !diverged.empty() || corrupt; }
  bool drops_step() const { return failed || corrupt; }
};

class Run {
 public:
  /// Opens OUT, finds where the run begins, and sets weights, optimizer and state. Collective.
  Run(Communicator& world, const TrainRequest& request, const TokenSource& source);

  /// Once nothing else can be refused: compares OUT's room with that of the checkpoints and opens
  /// its logs. Collective.
  void open_logs();
  /// Shown on rank 0.
  void note(const std::string& text);
  void note_lines(const std::vector<std::string>& lines);
  void note_warnings();  ///< of checkpoints
  /// Calls `work` on rank 0, whose files it uses. Collective.
  template <typename Work>
  void on_output(std::string_view what, const Work& work) {
    on_rank_zero(world, what, [&] {
      work();
      return std::string();
    });
  }

  /// Whether all steps are made.
  bool is_finished() const;
  /// Whether validation follows the last step.
  bool validates() const;
  /// This rank's: text that could not be read, or differs.
  const std::string& failure() const;
  /// Seconds of training, those before a resumption included.
  double elapsed_s() const;
  /// Saves the last step unless that is done. Returns the reason if it failed, or an empty string.
  /// Collective.
  std::string save_now();
  /// Writes OUT/final with the current weights. Collective.
  void write_final();
  /// Whether OUT/final has a model. Collective.
  bool has_final();

  Communicator& world;
  const TrainRequest& request;
  KernelThreads threads;
  TrainConfig config;  ///< with its dtype, format of data and replicas resolved
  const TokenSource& source;
  Sampler sampler;
  ParallelGroups groups;
  std::optional<ProgressLine> progress;  ///< rank 0
  std::optional<RunFiles> files;         ///< rank 0
  std::string init_from;                 ///< folder of the model whose weights the run starts from
  std::optional<SnapshotMemory> memory;
  std::optional<ModelRanks> ranks;
  std::optional<TrainedRanks> trained;
  std::optional<StepExecutor> executor;
  Utilization utilization;
  bool measured_peak = false;  ///< by this call
  TrainState state;
  std::optional<RunCheckpoints> checkpoints;
  std::optional<PhaseLog> phase_log;
  RunEnding ending;
  double loss = NAN;                            ///< of the last step
  std::chrono::steady_clock::time_point start;  ///< later by the time that is not of training
  double elapsed_before_s = 0;                  ///< before this run was resumed

 private:
  void find_init();
  SnapshotOwner open_output();
  void resolve_dtype(const ResumePoint& from);
  void begin(const ResumePoint& from);
  void make_checkpoints();
  TrainedRanks trained_ranks();

  AbandonOnError abandon_{world};  // destroyed first: the others free memory
};

}  // namespace tandem
