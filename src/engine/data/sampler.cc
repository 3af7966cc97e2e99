#include "engine/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "engine/model/config.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr uint64_t kOrderStream = stream_of("sample order");

}  // namespace

int64_t permute(uint64_t seed, uint64_t epoch, int64_t size, int64_t index) {
  const int half = (int(std::bit_width(uint64_t(size - 1))) + 1) / 2;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  uint64_t value = uint64_t(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = philox(seed, kOrderStream + epoch, right << 2 | round)[0] & mask;
      left = std::exchange(right, left ^ mixed);
    }
    value = left << half | right;
  } while (value >= uint64_t(size));
  return int64_t(value);
}

Sampler::Sampler(const Corpus& corpus, int64_t seq, uint64_t seed,
                 std::function<int64_t(int64_t sample)> order)
    : corpus_(corpus),
      seq_(seq),
      windows_((corpus.tokens() - 2) / seq + 1),
      seed_(seed),
      order_(std::move(order)) {}

int64_t Sampler::window(int64_t sample) const {
  if (order_) sample = order_(sample);
  return permute(seed_, uint64_t(sample / windows_), windows_, sample % windows_);
}

int64_t Sampler::targets(int64_t sample) const {
  return std::min(seq_, corpus_.tokens() - 1 - window(sample) * seq_);
}

void Sampler::read(int64_t sample, std::span<int32_t> tokens, std::span<int32_t> targets) const {
  const int64_t begin = window(sample) * seq_;
  corpus_.read(begin, tokens);
  corpus_.read(begin + 1, targets);
  std::replace(tokens.begin(), tokens.end(), -1, kBos);
}

}  // namespace tandem
