// Order of the windows of the training stream.
//
// Window w holds tokens [w * seq, w * seq + seq) and as targets the token after each, so the
// windows together predict every token of the stream but the first exactly once; the last window
// may be short (targets -1). Samples are numbered 0, 1, 2, … over the whole run: sample i is window
// permutation(i mod windows) of epoch i / windows. The permutation is a keyed bijection computed
// from (seed, epoch, index), so the sampler's whole state is the number of the next sample and does
// not depend on how many ranks share the batch.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "engine/data/corpus.h"

namespace tandem {

/// Bijection of [0, size): a Feistel network on the next even number of bits, iterated until the
/// value is below size (cycle walking).
int64_t permute(uint64_t seed, uint64_t epoch, int64_t size, int64_t index);

class Sampler {
 public:
  /// `order`: maps the numbers of samples that are asked for to those of the run, for layouts that
  /// divide a step among other ranks; none: the same.
  Sampler(const Corpus& corpus, int64_t seq, uint64_t seed,
          std::function<int64_t(int64_t sample)> order = {});
  int64_t windows() const { return windows_; }
  int64_t epoch(int64_t sample) const { return sample / windows_; }
  int64_t window(int64_t sample) const;
  /// Number of targets of the sample that are not -1.
  int64_t targets(int64_t sample) const;
  /// Fills seq tokens and seq targets.
  void read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const;

 private:
  const Corpus& corpus_;
  int64_t seq_, windows_;
  uint64_t seed_;
  std::function<int64_t(int64_t sample)> order_;
};

}  // namespace tandem
