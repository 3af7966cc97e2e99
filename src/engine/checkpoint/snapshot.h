// Copies of the state that a rank owns, from which checkpoints are written while training changes
// the state.
//
// A snapshot has two generations in one memory without a name in any file system (memfd), which
// outlives this process if another one holds it. A generation is valid from the moment its header
// is complete, which is written last: it has the step and hashes of the train state and of all
// values. At every moment after the first `take` at least one generation is valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "comm/processes/shared_memory.h"
#include "core/download.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/trained_ranks.h"

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
  std::vector<SnapshotSlice> slices;
  std::vector<SnapshotSlice> residuals;  ///< by group of all stages
  size_t values = 0;
};

class SnapshotGeneration : public OwnedState {
 public:
  /// `memory`: of bytes(), for the lifetime of this object.
  SnapshotGeneration(const Exec& exec, const SnapshotLayout& layout, std::byte* memory,
                     size_t state_bytes);
  static size_t bytes(const SnapshotLayout& layout, size_t state_bytes);

  /// Copies the state of `ranks`; invalid meanwhile. On a GPU of its own a rank only enqueues the
  /// copies, on a stream of their own, and another thread completes the generation: call
  /// `before_update` before the state changes. Throws InvalidArgument if the state has other slices
  /// than the layout.
  void take(const TrainedRanks& ranks, const TrainState& state);
  /// Updates of the state enqueued from now on start after the copies of `take`.
  void before_update(const TrainedRanks& ranks) const;
  /// Step of a valid generation; -1 if it is not valid.
  int64_t step() const;
  /// State of training at this step. Throws IoError if the generation is not valid or its bytes
  /// have changed since `take`.
  TrainState verify() const;
  void for_each(size_t stage, Moment moment, const Visit& visit) const override;
  std::vector<std::span<const float>> residuals() const override;

 private:
  struct Header;
  static std::string header_hash(const Header& header);
  Header& header() const;
  std::span<char> state_text() const;
  std::span<float> values(const SnapshotSlice& slice) const;
  void complete(int64_t step, const std::string& state, const std::string& values_hash);

  const SnapshotLayout& layout_;
  std::byte* memory_;
  size_t state_bytes_;
  float* values_;
  Download download_;
  std::shared_future<void> completed_;  // of enqueued copies
};

class Snapshot {
 public:
  /// Allocates both generations. `state`: that of the run's begin. Throws IoError.
  Snapshot(const TrainedRanks& ranks, const TrainState& state);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  SnapshotGeneration& generation(int index) { return generations_[size_t(index)]; }
  const SnapshotGeneration& generation(int index) const { return generations_[size_t(index)]; }
  size_t bytes() const { return memory_->bytes(); }

 private:
  SnapshotLayout layout_;
  std::shared_ptr<processes::SharedMemory> memory_;
  std::deque<SnapshotGeneration> generations_;
};

}  // namespace tandem
