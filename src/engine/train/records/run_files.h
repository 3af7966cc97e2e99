// Files of a training run under OUT, as rank 0 keeps them, and the decision where a run begins.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/run_lock.h"
#include "engine/config/config.h"
#include "engine/data/ledger/ledger.h"
#include "engine/data/tokens/token_source.h"
#include "engine/report/progress.h"
#include "engine/train/records/metrics_log.h"

namespace tandem {

class RunFiles {
 public:
  /// Locks OUT, for which it waits `patience_s` seconds, and which must hold no run unless
  /// `resume`. Throws ConfigError and IoError. `progress` receives notes. `config`: of the run,
  /// which resolves its dtype and replicas later; like the rest it must outlive this object.
  RunFiles(const std::string& out, bool resume, const TrainConfig& config,
           const TokenSource& source, ProgressLine& progress, double patience_s);

  /// Number drawn when the run began, in OUT/run_id: tells its snapshots from those of other runs.
  const std::string& run_id() const { return run_id_; }
  /// Path of the newest valid checkpoint after `after_step`, to resume from, or an empty string.
  /// Throws ConfigError if it is another run's; IoError if `after_step` is -1 and there are only
  /// damaged ones.
  std::string find_checkpoint(int64_t after_step);
  /// Checks and announces a state in memory, `name`, to resume from, as for a checkpoint.
  void accept_memory(const TrainState& state, const std::string& name);
  void note(const std::string& text) { progress_.note(text); }
  void warn(const std::string& text) { progress_.note("warning: " + text); }
  /// Writes config.toml, with the settings in effect, run_id, heldout.txt, data.json and the
  /// tokenizer, of a folder with the files next to it.
  void write_configuration() const;
  /// Throws IoError if OUT now belongs to another run: nothing may be written there.
  void require_output() const;
  /// Why nothing may be written to OUT, as require_output() throws it; empty: it is this run's.
  std::string find_other_owner() const;
  /// Throws IoError, or warns with the numbers, if OUT has no room for the checkpoints of the run
  /// after `step`; with `in_memory`, it has its state there and only warns.
  void check_room(int64_t step, bool in_memory);
  /// Opens metrics.jsonl and ledger.jsonl after step `start.step`; lines of later steps are
  /// dropped from the first, and marked by a line in the second. Warns of lines before that are
  /// missing or were changed.
  void open_logs(const LedgerStart& start);
  /// Adds a line to metrics.jsonl. Warns once while it cannot be written: the next call tries
  /// again.
  void add(const StepRecord& step);
  /// Begins to add a line to ledger.jsonl, after those before are on disk; warns likewise. Notes
  /// the samples of a dropped step.
  void add(const LedgerStep& step);
  /// Writes OUT/`name`, at the end of the run; warns if it cannot be written.
  void write(const std::string& name, const std::string& text);
  /// Before a checkpoint: writes what is missing if OUT was removed meanwhile, and syncs
  /// ledger.jsonl, or throws IoError, and metrics.jsonl. Another thread may add lines meanwhile.
  void prepare_checkpoint();

 private:
  void accept(const Checkpoint& found);
  void append(const LedgerStep& step);
  template <typename Write>
  void try_writing(bool& fails, const Write& write);

  std::string out_;
  const TrainConfig& config_;
  const TokenSource& source_;
  ProgressLine& progress_;
  std::optional<RunLock> lock_;
  struct Logs {
    std::shared_ptr<Ledger> ledger;
    std::shared_ptr<MetricsLog> metrics;
  };
  Logs logs();
  void replace_logs(const LedgerStart& start);
  void replace_removed();

  std::mutex mutex_;
  std::shared_ptr<Ledger> ledger_;  // this and the next two are replaced under the mutex
  std::shared_ptr<MetricsLog> log_;
  LedgerStart position_;     // after the last step added
  bool is_removed_ = false;  // OUT was, and not all files in it are new; as the next one,
  bool sync_fails_ = false;  // of the thread that writes checkpoints
  bool ledger_fails_ = false, metrics_fail_ = false;
  std::string run_id_;
};

}  // namespace tandem
