// Copies of the state that a rank owns, from which checkpoints are written while training changes
// the state.
//
// A snapshot has several generations in memory that may outlive this process
// (engine/checkpoint/snapshot/snapshot_area.h). A generation is valid from the moment its header is
// complete, which is written last: it has the step and hashes of the train state and of all values.
// At every moment after the first `take` at least one generation is valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <span>
#include <string>
#include <vector>

#include "core/download.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/trained_ranks.h"
#include "engine/checkpoint/snapshot/snapshot_area.h"

namespace tandem {

/// Contiguous values and their position in a generation.
struct SnapshotSlice {
  size_t stage = 0;
  Moment moment{};
  int64_t begin = 0;  ///< in the stage's flat array
  size_t at = 0;      ///< first value in the generation
  size_t count = 0;
};

/// All values of a generation: sections in the order of stages and moments, then residuals.
struct SnapshotLayout {
  explicit SnapshotLayout(const TrainedRanks& ranks);
  SnapshotShape shape(int generations, size_t state_room) const;
  /// Whether generations of this shape have the same values.
  bool fits(const SnapshotShape& shape) const;
  std::vector<SnapshotSlice> slices;
  std::vector<SnapshotSlice> residuals;  ///< by group of all stages
  size_t values = 0;
};

class SnapshotGeneration : public OwnedState {
 public:
  /// Generation `index` of an area of this layout, which must outlive this object.
  SnapshotGeneration(const Exec& exec, const SnapshotLayout& layout, const SnapshotArea& area,
                     int index);

  /// Copies the state of `ranks`; invalid meanwhile. On a GPU of its own a rank only enqueues the
  /// copies, on a stream of their own, and another thread completes the generation, unless the
  /// rank has lost another one meanwhile: call `before_update` before the state changes. `start`:
  /// of the run. Throws InvalidArgument if the state has other slices than the layout.
  void take(const TrainedRanks& ranks, const TrainState& state, uint64_t start = 0);
  /// Returns once the generation is complete. Any thread.
  void await_complete() const;
  /// Also throws, while copies have not ended, what the ranks find. The rank's own thread.
  void await_complete_checked() const;
  /// Updates of the state enqueued from now on start after the copies of `take`.
  void before_update(const TrainedRanks& ranks) const;
  /// Step of a valid generation; -1 if it is not valid.
  int64_t step() const;
  /// State of training at this step. Throws IoError if the generation is not valid or its bytes
  /// have changed since `take`.
  TrainState verify() const;
  void for_each(size_t stage, Moment moment, const Visit& visit) const override;
  std::vector<Tensor> residuals() const override;

 private:
  std::span<char> state_text() const;
  Tensor values(const SnapshotSlice& slice) const;
  void complete(int64_t step, uint64_t start, const std::string& state,
                const std::string& values_hash);

  const SnapshotLayout& layout_;
  SnapshotHeader* header_;
  size_t state_room_;
  float* values_;
  Download download_;
  std::shared_future<void> completed_;  // of enqueued copies
};

class Snapshot {
 public:
  /// Generations in `area`, which must outlive this object: those that are there if they are
  /// `owner`'s and have this shape, or else invalid ones. `state`: that of the run's begin. Throws
  /// IoError.
  Snapshot(const TrainedRanks& ranks, const TrainState& state, SnapshotArea& area,
           const SnapshotOwner& owner, int generations);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  SnapshotGeneration& generation(int index) { return generations_[size_t(index)]; }
  const SnapshotGeneration& generation(int index) const { return generations_[size_t(index)]; }

 private:
  SnapshotLayout layout_;
  std::deque<SnapshotGeneration> generations_;
};

}  // namespace tandem
