// Choice of a token from its row's logits, or from parts of them: a shard's sums and likeliest
// tokens give the choice that the whole row gives, bit for bit. Weights of tokens are integers, so
// sums over tokens have one result in any order and division.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/sample.h"

namespace tandem::cpu {

/// A token and its logit.
struct Candidate {
  float logit;
  int32_t token;
};
/// Order of the likeliest tokens: by descending logit, then by token.
inline bool is_likelier(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

/// Weights exp((logit - max) / temperature) of tokens, in units of a power of two of which the sum
/// over `vocab` tokens fits 63 bits. A token's weight depends on nothing else.
class TokenWeights {
 public:
  /// `max`: largest logit of the row, finite; `temperature`: above 0.
  TokenWeights(float max, double temperature, int64_t vocab);
  /// Tokens that are weighed at a time.
  static constexpr size_t kBlock = 16;
  /// Weights of up to kBlock logits.
  std::array<uint64_t, kBlock> weigh(std::span<const float> logits) const;
  uint64_t weigh(float logit) const { return weigh({&logit, 1})[0]; }
  uint64_t sum(std::span<const float> logits) const;
  /// First index at which the sum of the weights up to it is above `position`; nullopt if the sum
  /// of all is not.
  std::optional<size_t> find(std::span<const float> logits, uint64_t position) const;
  /// Logarithm of a sum of exponentials of logits, at temperature 1.
  double log_of(uint64_t sum) const;

 private:
  double max_, temperature_, unit_;
};

/// Largest logit of a row or a shard of one, the first of equal ones, of tokens from `first` on;
/// token -1 if one is not finite.
Candidate find_max(std::span<const float> logits, int32_t first);

/// Likeliest `count` tokens, or all, in order; `logits` are those of tokens from `first` on.
std::vector<Candidate> find_likeliest(std::span<const float> logits, int32_t first, size_t count);

/// Whether a token is chosen among the likeliest ones, not by its position among all tokens.
bool chooses_among_likeliest(const SampleOptions& options, int64_t vocab);

/// Position in [0, sum), by the options' random number.
uint64_t draw(const SampleOptions& options, uint64_t sum);

/// Choice among the likeliest tokens of a row with `vocab` tokens whose weights have the sum
/// `total`; nullopt if it depends on tokens after `likeliest`.
std::optional<Candidate> choose_likeliest(std::span<const Candidate> likeliest,
                                          const TokenWeights& weights, uint64_t total,
                                          int64_t vocab, const SampleOptions& options);

}  // namespace tandem::cpu
