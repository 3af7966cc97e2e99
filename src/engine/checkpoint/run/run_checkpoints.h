// Checkpoints of a run. While it trains, every due checkpoint is a snapshot in memory
// (engine/checkpoint/snapshot/snapshot.h), for which a step waits, and a thread of each rank, with
// a communicator of its own, writes it to disk, syncs and verifies it. A checkpoint counts as saved
// only then.
//
// Snapshots may be more frequent than checkpoints (checkpoint.snapshot_every): a run that resumes
// restores from those in the memory of its launcher (engine/checkpoint/snapshot/snapshot_memory.h).
// They are copied to peers in the background; one copy runs at a time. A snapshot is not taken if a
// write and a copy run and it would replace the last one of which all ranks have copies.
//
// One write runs at a time. A snapshot that is due meanwhile is taken all the same, and written
// next unless a newer one has replaced it. A write that fails for a reason of the file system is
// reported once, and tried again with the next checkpoint that is due: it does not end the run.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/config.h"
#include "engine/checkpoint/run/trained_ranks.h"
#include "engine/checkpoint/snapshot/peer_copies.h"
#include "engine/checkpoint/snapshot/snapshot.h"
#include "engine/checkpoint/snapshot/snapshot_memory.h"

namespace tandem {

struct CheckpointSchedule {
  int64_t snapshot_every;  ///< steps, in memory; 0: none but those that are written to disk
  int64_t every;           ///< steps; 0: none
  double every_s;          ///< seconds of training; 0: none
  bool first_step;         ///< also after step 1
  bool peer_copy;          ///< snapshots are copied to peers
  explicit CheckpointSchedule(const CheckpointConfig& checkpoint)
      : snapshot_every(checkpoint.snapshot_every),
        every(checkpoint.every),
        every_s(checkpoint.every_s),
        first_step(checkpoint.first_step),
        peer_copy(checkpoint.peer_copy) {}
  bool is_periodic() const { return snapshot_every > 0 || every > 0 || every_s > 0 || first_step; }
  /// The newest one and the one that is taken, and more often than checkpoints also the one that is
  /// written to disk. With peers also the last one of which they have copies, while the next one is
  /// copied.
  int generations() const { return snapshot_every > 0 ? 3 + peer_copy : 2; }
};

class RunCheckpoints {
 public:
  struct Options {
    std::string out;  ///< as this rank sees it
    ModelConfig model;
    CheckpointSchedule schedule;
    int64_t keep = 1;                  ///< rank 0
    SnapshotMemory* memory = nullptr;  ///< of this rank's snapshots
    Communicator* peers = nullptr;  ///< data-parallel ranks that have each other's copies, or none
    /// Called on rank 0 before a checkpoint is written, by the thread that writes it.
    std::function<void()> prepare;
  };
  /// `ranks` must outlive this object. Allocates snapshots if checkpoints are periodic. Collective.
  RunCheckpoints(const TrainedRanks& ranks, Options options, const TrainState& state);
  /// Waits for the write that runs; after an exception at most 10 s.
  ~RunCheckpoints();
  RunCheckpoints(const RunCheckpoints&) = delete;
  RunCheckpoints& operator=(const RunCheckpoints&) = delete;

  /// Whether a snapshot is due after this step; the same on every rank. The state that ranks own
  /// must be updated then.
  bool is_due(const TrainState& state) const;
  /// Background work of this rank when it was called, or of any rank. Snapshots before are complete
  /// then.
  struct Running {
    bool writes = false, copies = false;
    Running operator|(const Running& other) const {
      return {writes || other.writes, copies || other.copies};
    }
  };
  Running running();
  /// Before every update: on GPUs it starts after the copies of snapshots.
  void before_update() const;
  /// After every step, with `requested`, a checkpoint was asked for, and `running` of all ranks in
  /// this step; both the same on every rank. Throws what a write has thrown other than IoError.
  /// Collective, but ranks do not wait for one another.
  void after_step(const TrainState& state, bool requested, Running running);
  /// Waits for the write that runs and saves `state` unless that is done. Returns the reason if it
  /// could not be saved, on every rank, else an empty string. Collective.
  std::string save_now(const TrainState& state);
  /// Waits for the write that runs. A checkpoint of `step` is set aside as NAME.corrupt, and
  /// snapshots in memory from it on become invalid. Returns "resume from CHECKPOINT", which this
  /// run or one before has written, or that there is none. Collective.
  std::string set_aside(int64_t step);

  /// Step of the newest checkpoint that this run has written and verified; -1: none.
  int64_t saved_step() const { return saved_step_; }
  /// Bytes of this rank's snapshots.
  size_t snapshot_bytes() const { return snapshot_ ? memory_bytes() : 0; }
  /// Milliseconds for which steps have waited since the last call.
  double take_blocked_ms();
  /// Rank 0: warnings since the last call.
  std::vector<std::string> take_warnings();

 private:
  struct Outcome {
    int64_t step = -1, next_sample = -1;
    std::string error;  ///< of the file system; empty: saved
  };
  Outcome write(const SnapshotGeneration& generation, int64_t step, int64_t next_sample);
  void save(Communicator& world, const OwnedState& owned, const TrainState& state);
  void collect(const Outcome& outcome);
  void warn(const std::string& text);
  bool is_checkpoint_due(const TrainState& state) const;
  int free_generation() const;
  bool take_snapshot(const TrainState& state);
  void copy_to_peer();
  int num_threads() const;
  size_t memory_bytes() const;
  Outcome save_live(const TrainState& state);
  void await_newest() const;

  const TrainedRanks& ranks_;
  Options options_;
  std::optional<CheckpointKeeper> keeper_;    // rank 0
  std::unique_ptr<Communicator> background_;  // of the thread that writes
  std::optional<Snapshot> snapshot_;          // this and the one above: of periodic checkpoints
  std::optional<PeerCopies> copies_;
  int newest_ = 0;  // generation
  int64_t newest_step_ = -1, newest_sample_ = -1;
  bool is_pending_ = false;           // the newest one is to be written
  bool is_owed_ = false;              // one was due for a checkpoint, and no generation was free
  int written_ = -1;                  // generation that is being written, or -1
  int copying_ = -1;                  // generation that is being sent to the peer, or -1
  int copied_ = -1;                   // the last one of which all ranks' peers have copies, or -1
  bool is_copied_elsewhere_ = false;  // there is such a step, but this rank has lost it
  std::future<Outcome> write_;
  double due_s_;  // time of the last checkpoint by every_s
  double blocked_ms_ = 0;
  int64_t saved_step_ = -1, saved_sample_ = -1;
  bool is_failing_ = false;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

}  // namespace tandem
