#include "kernels/sample.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/token_choice.h"

namespace tandem {
namespace {

/// Candidates that a choice with top_p begins with.
constexpr size_t kFirstCandidates = 256;

int32_t choose(std::span<const float> logits, const cpu::Candidate& max,
               const SampleOptions& options) {
  if (options.temperature == 0) return max.token;
  const auto vocab = int64_t(logits.size());
  const cpu::TokenWeights weights(max.logit, options.temperature, vocab);
  const uint64_t total = weights.sum(logits);
  if (!cpu::chooses_among_likeliest(options, vocab)) {
    return int32_t(*weights.find(logits, cpu::draw(options, total)));
  }
  size_t count = options.top_k > 0 ? size_t(options.top_k) : kFirstCandidates;
  while (true) {
    const auto likeliest = cpu::find_likeliest(logits, 0, count);
    if (const auto chosen = cpu::choose_likeliest(likeliest, weights, total, vocab, options)) {
      return chosen->token;
    }
    count *= 8;
  }
}

}  // namespace

Sampled sample_row(std::span<const float> logits, const SampleOptions& options,
                   std::span<const float> changed) {
  const cpu::Candidate max = cpu::find_max(logits, 0);
  if (max.token < 0) return {-1, 0};
  int32_t token = 0;
  if (changed.empty()) {
    token = choose(logits, max, options);
  } else {
    const auto likeliest = std::ranges::max_element(changed);
    token = choose(changed, {*likeliest, int32_t(likeliest - changed.begin())}, options);
  }
  return {token, float(double(logits[size_t(token)]) - log_sum_exp(logits))};
}

double log_sum_exp(std::span<const float> logits) {
  const cpu::Candidate max = cpu::find_max(logits, 0);
  if (max.token < 0) return std::numeric_limits<double>::quiet_NaN();
  const cpu::TokenWeights weights(max.logit, 1, int64_t(logits.size()));
  return weights.log_of(weights.sum(logits));
}

}  // namespace tandem
