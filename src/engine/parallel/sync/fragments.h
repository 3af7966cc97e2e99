// Fragments of a model that learners exchange in turn (Streaming DiLoCo, arXiv 2501.18512, section
// 2.2): which parameters, and in which steps. Pure functions of the model's list of parameters and
// of the job, the same at every layout of the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "engine/model/parameter.h"
#include "engine/parallel/sharded/parameter_slices.h"
#include "engine/parallel/sync/config.h"
#include "engine/parallel/sync/exchange.h"

namespace tandem {

/// Fragment of each parameter: consecutive ones of about equally many elements.
std::vector<int> assign_fragments(std::span<const Parameter> list, int64_t fragments);

/// Elements of a rank's flat array as learners exchange them.
class FragmentSlices {
 public:
  /// `list` must outlive this object.
  FragmentSlices(std::span<const Parameter> list, int64_t fragments);

  struct Slice {
    int64_t flat = 0;  ///< first element in the flat array
    int fragment = 0;
    SyncSlice slice;  ///< `begin` is 0
  };
  /// Slices of a range of the flat array, in its order: what is adjacent there is in a message,
  /// too. Padding is in none.
  std::vector<Slice> in(FlatRange range) const;
  /// Adds them to the shards of their fragments.
  void add(FlatRange range, std::span<SyncShard> fragments) const;

 private:
  std::span<const Parameter> list_;
  std::vector<int> fragments_;  // by parameter
  ParameterSlices slices_;
};

/// Fragment that is sent after `step`, counted from 1: fragment p after the steps that are
/// p x every / fragments modulo `every`.
std::optional<int> fragment_due(const SyncConfig& config, int64_t step);

/// Exchange that began after a step.
struct SentFragment {
  int fragment = 0;
  int64_t step = 0;
};
/// Exchange that runs after `step`: begun, and applied only after a later one.
std::optional<SentFragment> fragment_in_flight(const SyncConfig& config, int64_t step);

}  // namespace tandem
