// Error bound of GPU results, on emulated GEMMs and sums: correct arithmetic stays within it, and
// realistic defects exceed it on some output.
#include "bench/error_bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string_view>
#include <utility>
#include <vector>

#include "overlap/contract/cuda/roundings.h"
#include "tandem/random.h"

namespace tandem {
namespace {

using Terms = std::vector<double>;

float bf16(double value) {
  return BFloat16::from_float(float(value)).to_float();
}
float f16(double value) {
  return Float16::from_float(float(value)).to_float();
}

double operand(DType dtype, uint64_t stream, uint64_t index) {
  const float value = 2 * uniform(3, stream, index) - 1;
  return dtype == DType::e4m3 ? Float8E4M3::from_float(value).to_float() : bf16(value);
}

// Terms of output `number` on one rank.
Terms terms_of(DType dtype, int64_t k, uint64_t number, int rank = 0, bool positive = false) {
  Terms terms(static_cast<size_t>(k));
  const uint64_t stream = 2 * (number * 16 + uint64_t(rank));
  for (size_t i = 0; i < terms.size(); ++i) {
    terms[i] = operand(dtype, stream, i) * operand(dtype, stream + 1, i);
    if (positive) terms[i] = std::abs(terms[i]);
  }
  return terms;
}

double sum_of(const Terms& terms) {
  double sum = 0;
  for (const double term : terms) sum += term;
  return sum;
}
double root_of(const Terms& terms) {
  double squares = 0;
  for (const double term : terms) squares += term * term;
  return std::sqrt(squares);
}

// `value` truncated as in a sum whose largest addend is `largest`.
double aligned(double value, double largest) {
  const double step = std::ldexp(1.0, std::ilogb(largest) - 13);
  return std::trunc(value / step) * step;
}

// Sum of e4m3 products as Hopper's tensor cores compute it, 32 at a time; promoted to f32 after
// `promotion`.
double tensor_cores_sum(const Terms& terms, size_t promotion) {
  float promoted = 0;
  double sum = 0;
  for (size_t i = 0; i < terms.size(); i += 32) {
    const size_t end = std::min(i + 32, terms.size());
    double largest = std::abs(sum);
    for (size_t j = i; j < end; ++j) largest = std::max(largest, std::abs(terms[j]));
    if (largest == 0) continue;
    double next = aligned(sum, largest);
    for (size_t j = i; j < end; ++j) next += aligned(terms[j], largest);
    sum = next == 0 ? 0 : aligned(next, next);
    if (end % promotion == 0 || end == terms.size()) promoted += float(std::exchange(sum, 0));
  }
  return promoted;
}

// Min and max error over all `outputs`, relative to the bound of one GEMM.
struct Range {
  double minimum = 1e300, maximum = 0;
};
Range of_bound(DType in, DType out, int64_t k, int outputs, bool positive,
               const std::function<double(const Terms&)>& compute) {
  Range range;
  const AccumulationError lost = accumulation_error(in, out, k);
  for (int number = 0; number < outputs; ++number) {
    const Terms terms = terms_of(in, k, uint64_t(number), 0, positive);
    const double exact = sum_of(terms);
    ErrorBound bound;
    bound.add_partial(exact, root_of(terms), lost, out, false);
    bound.round(exact, out);
    const double share = std::abs(compute(terms) - exact) / bound.error();
    range = {std::min(range.minimum, share), std::max(range.maximum, share)};
  }
  return range;
}

TEST(ErrorBound, HalfUlpIsHalfOfTheStepToTheNextValue) {
  for (const float value : {1.f, 1.5f, -3.f, 250.f, 0x1p-13f}) {
    const uint16_t code = BFloat16::from_float(value).bits, other = Float16::from_float(value).bits;
    const auto step_bf16 = double(BFloat16{uint16_t(code + 1)}.to_float()) - value;
    const auto step_f16 = double(Float16{uint16_t(other + 1)}.to_float()) - value;
    EXPECT_EQ(half_ulp(value, DType::bf16), std::abs(step_bf16) / 2) << value;
    EXPECT_EQ(half_ulp(value, DType::f16), std::abs(step_f16) / 2) << value;
    const float next = std::nextafter(value, 2 * value);
    EXPECT_EQ(half_ulp(value, DType::f32), std::abs(double(next) - value) / 2) << value;
  }
  EXPECT_EQ(half_ulp(0, DType::f16), 0x1p-25);
}

// All terms are positive, so that the accumulators' truncation errors add up.
TEST(ErrorBound, DistinguishesPromotionIntervalsOfE4m3Sums) {
  for (const int64_t k : {2048, 4096}) {
    const auto promoted = [&](size_t promotion) {
      return of_bound(DType::e4m3, DType::f16, k, 100, true,
                      [&](const Terms& terms) { return f16(tensor_cores_sum(terms, promotion)); });
    };
    EXPECT_LT(promoted(128).maximum, 0.4) << k;
    EXPECT_LT(promoted(kLatestPromotionK).maximum, 0.7) << k;
    EXPECT_GT(promoted(512).maximum, 1) << k;
    EXPECT_GT(promoted(1024).minimum, 2) << k;
  }
}

TEST(ErrorBound, HoldsForE4m3OfAnySign) {
  for (const int64_t k : {16, 272, 4096}) {
    const auto promoted = of_bound(DType::e4m3, DType::f16, k, 400, false, [](const Terms& terms) {
      return f16(tensor_cores_sum(terms, kLatestPromotionK));
    });
    EXPECT_LT(promoted.maximum, 0.8) << k;
  }
}

// Sums along K, `step` terms at a time; `keep` rounds the running sum after each step.
double accumulated(const Terms& terms, size_t step, const std::function<double(double)>& keep) {
  double sum = 0;
  for (size_t i = 0; i < terms.size(); ++i) {
    sum += terms[i];
    if ((i + 1) % step == 0) sum = keep(sum);
  }
  return sum;
}
double accumulated_in_f32(const Terms& terms) {
  return accumulated(terms, 1, [](double sum) { return float(sum); });
}
double cut_off(double sum) {  // to f32, as tensor cores do
  const double step = sum == 0 ? 1 : std::ldexp(1.0, std::ilogb(sum) - 23);
  return std::trunc(sum / step) * step;
}

TEST(ErrorBound, CoversOneRoundingAndNoMore) {
  constexpr int kOutputs = 1000;
  for (const int64_t k : {64, 520, 1544}) {
    const auto maximum = [&](DType out, const std::function<double(const Terms&)>& compute) {
      return of_bound(DType::bf16, out, k, kOutputs, false, compute).maximum;
    };
    const auto half = [](const Terms& terms, bool second) {
      const auto middle = terms.begin() + std::ptrdiff_t(terms.size() / 2);
      return second ? Terms(middle, terms.end()) : Terms(terms.begin(), middle);
    };
    const auto in_halves = [&](const Terms& terms, const auto& handed_over) {
      return accumulated_in_f32(half(terms, false)) +
             handed_over(accumulated_in_f32(half(terms, true)));
    };
    EXPECT_LT(maximum(DType::f32, accumulated_in_f32), 0.7) << k;
    EXPECT_LT(maximum(DType::f32, [](const Terms& t) { return accumulated(t, 16, cut_off); }), 0.7)
        << k;
    EXPECT_LE(maximum(DType::bf16, [](const Terms& t) { return bf16(accumulated_in_f32(t)); }), 1)
        << k;
    EXPECT_LE(maximum(DType::f16, [](const Terms& t) { return f16(accumulated_in_f32(t)); }), 1)
        << k;
    const auto as_two = [](double number) {
      return bf16(number) + double(bf16(number - bf16(number)));
    };
    EXPECT_LE(maximum(DType::bf16, [&](const Terms& t) { return bf16(in_halves(t, as_two)); }), 1)
        << k;

    EXPECT_GT(maximum(DType::bf16, [&](const Terms& t) { return bf16(in_halves(t, bf16)); }), 2)
        << k << ": the second half of K was handed over in bf16";
    EXPECT_GT(maximum(DType::f16, [&](const Terms& t) { return f16(in_halves(t, f16)); }), 2)
        << k << ": the second half of K was handed over in f16";
    EXPECT_GT(maximum(DType::f32, [&](const Terms& t) { return in_halves(t, bf16); }), 100)
        << k << ": the second half of K was handed over in bf16";
    EXPECT_GT(maximum(DType::bf16, [](const Terms& t) { return accumulated(t, 16, bf16); }), 2)
        << k << ": accumulated in bf16";
    EXPECT_GT(maximum(DType::bf16, [](const Terms& t) { return bf16(sum_of(t) - t.back()); }), 100)
        << k << ": a term is missing";
  }
}

// Sum over ranks of bf16 partial sums, with the roundings of each candidate.
double sum_over_ranks(std::string_view candidate, const std::vector<double>& partials) {
  double sum = bf16(partials[0]);
  for (size_t r = 1; r < partials.size(); ++r) {
    sum += bf16(partials[r]);
    if (candidate == gpu::kNccl) sum = bf16(sum);
  }
  return bf16(sum);
}

double worst_sum(std::string_view candidate, int ranks,
                 const std::function<double(const std::vector<Terms>&)>& compute) {
  constexpr int64_t kK = 512;
  double worst = 0;
  const AccumulationError lost = accumulation_error(DType::bf16, DType::bf16, kK);
  for (int number = 0; number < 1000; ++number) {
    std::vector<Terms> of_ranks;
    double exact = 0;
    ErrorBound bound;
    for (int rank = 0; rank < ranks; ++rank) {
      of_ranks.push_back(terms_of(DType::bf16, kK, uint64_t(number), rank));
      const double partial = sum_of(of_ranks.back());
      exact += partial;
      bound.add_partial(partial, root_of(of_ranks.back()), lost, DType::bf16, true);
    }
    bound.round_running(gpu::roundings_of(candidate, ranks) - 1, DType::bf16);
    bound.round(exact, DType::bf16);
    worst = std::max(worst, std::abs(compute(of_ranks) - exact) / bound.error());
  }
  return worst;
}

TEST(ErrorBound, MatchesTheRoundingsOfEachCandidate) {
  const auto added = [](std::string_view candidate, const auto& partial_of) {
    return [candidate, partial_of](const std::vector<Terms>& of_ranks) {
      std::vector<double> partials;
      for (const Terms& terms : of_ranks) partials.push_back(partial_of(terms));
      return sum_over_ranks(candidate, partials);
    };
  };
  const auto in_bf16 = [](const Terms& terms) { return accumulated(terms, 64, bf16); };
  constexpr std::string_view kNccl = gpu::kNccl, kOurs = "chunked";
  for (const int ranks : {2, 4, 8}) {
    for (const std::string_view candidate : {kNccl, kOurs}) {
      EXPECT_LE(worst_sum(candidate, ranks, added(candidate, accumulated_in_f32)), 1) << ranks;
    }
    EXPECT_GT(worst_sum(kOurs, ranks, added(kOurs, in_bf16)), 1.2) << ranks;
  }
  EXPECT_GT(worst_sum(kOurs, 4, added(kNccl, accumulated_in_f32)), 1.1)
      << "running sums in bf16, which only NCCL's way says it has";
}

}  // namespace
}  // namespace tandem
