#include "engine/data/ledger/ledger_rehash.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/data/ledger/ledger_lines.h"

namespace tandem {

std::vector<std::string> rehash_steps(const LedgerCheck& ledger, const Sampler& sampler,
                                      int64_t steps, const std::function<void()>& advanced) {
  const auto all = int64_t(ledger.consumed.size());
  const int64_t count = steps > 0 ? std::min(steps, all) : all;
  std::vector<int32_t> tokens(size_t(ledger.start.seq)), targets(tokens.size());
  std::vector<std::string> problems;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = count > 1 ? int64_t(__int128(all - 1) * i / (count - 1)) : 0;
    const ConsumedStep& step = ledger.consumed[size_t(index)];
    uint64_t hash = 0;
    if (count < all) sampler.seek(step.cursors);  // else the shards are read from their begin
    if (sampler.cursors(step.begin) != step.cursors) {
      problems.push_back(fmt::format(
          "line {}: the cursors of step {} are others in the data: expected those recorded",
          step.line, step.step));
    }
    for (int64_t sample = step.begin; sample < step.end; ++sample) {
      sampler.read(sample, tokens, targets);
      hash += sample_hash(sample, tokens, targets);
    }
    if (hash != step.text_hash) {
      problems.push_back(fmt::format(
          "line {}: the samples of step {}, {} to {}, have hash {:016x} in the data: expected "
          "{:016x}",
          step.line, step.step, step.begin, step.end - 1, hash, step.text_hash));
    }
    if (advanced) advanced();
  }
  return problems;
}

}  // namespace tandem
