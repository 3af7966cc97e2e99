#include "kernels/cpu/token_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace tandem::cpu {
namespace {

/// Exponent of the max weight: sums of smaller vocabularies have bits to spare.
int weight_bits(int64_t vocab) {
  return std::min(42, 63 - int(std::bit_width(uint64_t(vocab))));
}

/// Weights of lower exponents are 0.
constexpr double kMinExponent = -60;

/// exp(x) for x from kMinExponent to 0, with a relative error of about 1e-15.
inline double exp_of(double x) {
  constexpr double kMagic = 0x1.8p52;  // adding it rounds to an integer in the low bits
  const double shifted = x * 0x1.71547652b82fep0 + kMagic;
  const double n = shifted - kMagic;
  const double r = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
  double p = 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 1.0 / 2;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const int64_t power = std::bit_cast<int64_t>(shifted) - std::bit_cast<int64_t>(kMagic);
  return p * std::bit_cast<double>((power + 1023) << 52);
}

}  // namespace

TokenWeights::TokenWeights(float max, double temperature, int64_t vocab)
    : max_(double(max)),
      temperature_(temperature),
      unit_(double(uint64_t{1} << weight_bits(vocab))) {}

std::array<uint64_t, TokenWeights::kBlock> TokenWeights::weigh(
    std::span<const float> logits) const {
  constexpr double kMagic = 0x1.8p52;
  std::array<float, kBlock> values;
  values.fill(-std::numeric_limits<float>::infinity());
  std::ranges::copy(logits, values.begin());
  std::array<uint64_t, kBlock> weights;
  const double max = max_, temperature = temperature_, unit = unit_;
  std::array<double, kBlock> exponents;  // a loop of its own: GCC vectorizes no branch
#pragma omp simd
  for (size_t i = 0; i < kBlock; ++i) {
    exponents[i] = std::max((double(values[i]) - max) / temperature, kMinExponent);
  }
#pragma omp simd
  for (size_t i = 0; i < kBlock; ++i) {
    const double weight = exp_of(exponents[i]) * unit;
    weights[i] = std::bit_cast<uint64_t>(weight + kMagic) - std::bit_cast<uint64_t>(kMagic);
  }
  return weights;
}

uint64_t TokenWeights::sum(std::span<const float> logits) const {
  uint64_t sum = 0;
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    for (const uint64_t weight : weigh(logits.subspan(i, std::min(kBlock, logits.size() - i)))) {
      sum += weight;
    }
  }
  return sum;
}

std::optional<size_t> TokenWeights::find(std::span<const float> logits, uint64_t position) const {
  uint64_t sum = 0;
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    const auto block = weigh(logits.subspan(i, std::min(kBlock, logits.size() - i)));
    for (size_t j = 0; j < kBlock; ++j) {
      sum += block[j];
      if (sum > position) return i + j;
    }
  }
  return std::nullopt;
}

double TokenWeights::log_of(uint64_t sum) const {
  return max_ + std::log(double(sum) / unit_);
}

Candidate find_max(std::span<const float> logits, int32_t first) {
  float max = -std::numeric_limits<float>::infinity();
  uint32_t bad = 0;
#pragma omp simd reduction(max : max) reduction(| : bad)
  for (size_t i = 0; i < logits.size(); ++i) {
    bad |= uint32_t(!(std::abs(logits[i]) <= std::numeric_limits<float>::max()));
    max = std::max(max, logits[i]);
  }
  if (bad != 0) return {max, -1};
  return {max, first + int32_t(std::ranges::find(logits, max) - logits.begin())};
}

std::vector<Candidate> find_likeliest(std::span<const float> logits, int32_t first, size_t count) {
  std::vector<Candidate> found;
  count = std::min(count, logits.size());
  if (count == 0) return found;
  found.reserve(2 * count);
  const auto reduce = [&] {
    std::ranges::nth_element(found, found.begin() + int64_t(count) - 1, is_likelier);
    found.resize(count);
  };
  // Equal logits of later tokens come after those that are found.
  bool is_full = false;
  float bound = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (is_full && !(logits[i] > bound)) continue;
    found.push_back({logits[i], first + int32_t(i)});
    if (found.size() < 2 * count) continue;
    reduce();
    is_full = true;
    bound = found.back().logit;
  }
  if (found.size() > count) reduce();
  std::ranges::sort(found, is_likelier);
  return found;
}

bool chooses_among_likeliest(const SampleOptions& options, int64_t vocab) {
  return options.top_p < 1 || (options.top_k > 0 && options.top_k < vocab);
}

uint64_t draw(const SampleOptions& options, uint64_t sum) {
  return std::min(uint64_t(options.uniform * double(sum)), sum - 1);
}

std::optional<Candidate> choose_likeliest(std::span<const Candidate> likeliest,
                                          const TokenWeights& weights, uint64_t total,
                                          int64_t vocab, const SampleOptions& options) {
  if (options.top_k > 0 && options.top_k < vocab) {
    const auto count = size_t(options.top_k);
    if (likeliest.size() < count) return std::nullopt;
    likeliest = likeliest.first(count);
    total = 0;
    for (const Candidate& each : likeliest) total += weights.weigh(each.logit);
  }
  uint64_t remaining = total;
  if (options.top_p < 1) {
    remaining = 0;
    size_t count = 0;
    while (double(remaining) < options.top_p * double(total)) {
      if (count == likeliest.size()) return std::nullopt;
      remaining += weights.weigh(likeliest[count++].logit);
    }
    likeliest = likeliest.first(count);
  }
  const uint64_t position = draw(options, remaining);
  uint64_t sum = 0;
  for (const Candidate& each : likeliest) {
    sum += weights.weigh(each.logit);
    if (sum > position) return each;
  }
  return std::nullopt;
}

}  // namespace tandem::cpu
