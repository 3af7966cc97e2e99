#include "engine/parallel/sharded/state_hashes.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>

#include "observe/recorder.h"

namespace tandem {
namespace {

constexpr int64_t kHashedElements = 4096;

/// Calls visit(begin, count) for the blocks of a run.
template <typename Visit>
void for_each_block(const ShardedState::Run& run, const Visit& visit) {
  for (int64_t begin = 0; begin < run.run.count; begin += kHashedElements) {
    visit(begin, std::min(kHashedElements, run.run.count - begin));
  }
}

}  // namespace

bool is_checked(double position, int64_t step, double share) {
  constexpr double kGolden = 0.6180339887498949;
  const double moved = position + kGolden * double(step);
  return moved - std::floor(moved) < share;
}

StateHashes::StateHashes(const ShardedState& state, int buckets, const StateCheckOptions& options)
    : state_(state), options_(options), hashes_(size_t(buckets)) {}

void StateHashes::store(int bucket) {
  std::vector<uint64_t>& hashes = hashes_[size_t(bucket)];
  hashes.clear();
  if (is_checked(double(bucket) / double(hashes_.size()), step_, options_.share)) {
    hashes = hash(bucket);
  }
}

void StateHashes::forget() {
  for (std::vector<uint64_t>& hashes : hashes_) hashes.clear();
}

/// Hashes of both moments, of the owners' weights, and of learners' anchors and outer momenta, by
/// block.
std::vector<uint64_t> StateHashes::hash(int bucket) const {
  const ScopedSpan span(SpanKind::compute, "check_state", bucket);
  std::vector<uint64_t> hashes;
  for (const ShardedState::Run& run : state_.runs(bucket)) {
    const bool has_weights = run.run.sharded || !options_.replicated_change;
    const Tensor anchor = state_.outer(Moment::anchor, run),
                 momentum = state_.outer(Moment::outer_momentum, run);
    for_each_block(run, [&](int64_t begin, int64_t count) {
      uint64_t hash = 0;
      const auto add = [&](const Tensor& values) {
        hash =
            XXH3_64bits_withSeed(values.as<float>() + begin, size_t(count) * sizeof(float), hash);
      };
      add(run.first);
      add(run.second);
      if (has_weights) add(run.updated);
      if (anchor.data()) add(anchor);
      if (momentum.data()) add(momentum);
      hashes.push_back(hash);
    });
  }
  return hashes;
}

std::vector<int64_t> StateHashes::find_changed() const {
  std::vector<int64_t> changed;
  for (int bucket = 0; bucket < int(hashes_.size()); ++bucket) {
    const std::vector<uint64_t>& expected = hashes_[size_t(bucket)];
    if (expected.empty()) continue;
    const std::vector<uint64_t> found = hash(bucket);
    if (found == expected) continue;
    size_t block = 0;
    for (const ShardedState::Run& run : state_.runs(bucket)) {
      for_each_block(run, [&](int64_t begin, int64_t) {
        if (found[block] != expected[block]) changed.push_back(run.run.begin + begin);
        ++block;
      });
    }
  }
  return changed;
}

}  // namespace tandem
