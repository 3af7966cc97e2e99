// Results of attention over pages in double, with a bound of the error that follows from the
// roundings. In a decisive case a key has most of a row's weight, so that one key missing, extra,
// shifted or of another page exceeds the bound by far.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/kernels/paged_cases.h"

namespace tandem::test {

/// Keys and values after all new rows were appended, as the pages store them.
class FinalPages {
 public:
  explicit FinalPages(const PagedCase& c)
      : c_(c),
        rope_(Exec{}, c.shape.max_tokens, c.shape.head_dim, PagedRunner::kRopeTheta),
        keys_(floats_of(c.keys)),
        values_(floats_of(c.values)) {
    const int64_t dim = c.shape.head_dim;
    for (size_t s = 0; s < c.lengths.size(); ++s) {
      const int64_t cached = c.lengths[s].all - c.lengths[s].new_ones;
      for (int64_t i = 0; i < c.lengths[s].new_ones; ++i) {
        for (int64_t head = 0; head < c.shape.kv_heads; ++head) {
          const int64_t at = index(c.slot(s, cached + i), head);
          const int64_t row = (c.first_row(s) + i) * c.width() + (c.shape.heads + head) * dim;
          rotate(row, cached + i, 1, &keys_[size_t(at)]);
          for (int64_t d = 0; d < dim; ++d) {
            values_[size_t(at + d)] = float(c.qkv.get(row + c.kv_width() + d));
          }
        }
      }
    }
  }
  /// The dtype's elements of a head from `first` in qkv, rotated forward (1) or back (-1).
  void rotate(int64_t first, int64_t position, float direction, float* to) const {
    std::vector<float> head;
    for (int64_t d = 0; d < c_.shape.head_dim; ++d) head.push_back(float(c_.qkv.get(first + d)));
    rotate(head, position, direction);
    for (size_t d = 0; d < head.size(); ++d) to[d] = rounded(head[d]);
  }
  void rotate(std::vector<float>& head, int64_t position, float direction) const {
    const float *const cos = rope_.cos(position), *const sin = rope_.sin(position);
    const auto half = size_t(rope_.half());
    for (size_t i = 0; i < half; ++i) {
      const float low = head[i], high = head[half + i], s = direction * sin[i];
      head[i] = low * cos[i] - high * s;
      head[half + i] = high * cos[i] + low * s;
    }
  }
  int64_t index(int64_t slot, int64_t kv_head) const {
    return (slot * c_.shape.kv_heads + kv_head) * c_.shape.head_dim;
  }
  const float* key(int64_t slot, int64_t kv_head) const {
    return &keys_[size_t(index(slot, kv_head))];
  }
  const float* value(int64_t slot, int64_t kv_head) const {
    return &values_[size_t(index(slot, kv_head))];
  }

 private:
  float rounded(float value) const {
    return c_.dtype() == DType::f32 ? value : BFloat16::from_float(value).to_float();
  }
  static std::vector<float> floats_of(const Values& values) {
    std::vector<float> all(size_t(values.view.elements()));
    for (size_t i = 0; i < all.size(); ++i) all[i] = float(values.get(int64_t(i)));
    return all;
  }
  const PagedCase& c_;
  RopeTable rope_;
  std::vector<float> keys_, values_;
};

/// The key that has most of the weight of a row and head, and one outside the row's mask that would
/// have as much; its slot is below 0 if there is none.
struct Deciding {
  int64_t key, outside;
};

inline Deciding deciding_keys(const PagedCase& c, size_t sequence, int64_t position, int64_t head) {
  const int64_t first = c.first_key(position), page = position / kPageTokens * kPageTokens;
  const int64_t keys[] = {position,
                          first,
                          first + 1,
                          page,
                          page - 1,
                          page / (2 * kPageTokens) * 2 * kPageTokens - 1,
                          int64_t(philox(9, uint64_t(position), uint64_t(head))[0])};
  int64_t key = keys[(position + head) % 7];
  if (key < first || key > position) key = first + std::abs(key) % (position + 1 - first);
  const bool before = head % 2 == 1 && first > 0;
  const int64_t outside = before ? first - 1 : position + 1;
  return {key, outside < c.shape.max_tokens ? c.slot(sequence, outside) : -1};
}

/// Natural logarithm of the weight of a deciding key before all weights are divided by their sum;
/// others' are around 0.
constexpr double kDecidingScore = 15;

/// Case in which `deciding_keys` decide.
inline PagedCase decisive_case(uint64_t trial, DType dtype, const PagedShape& shape, int64_t window,
                               const std::vector<Lengths>& lengths) {
  Draw draw{trial};
  PagedCase c(dtype, shape, window, lengths, draw);
  const auto spread = [&](const Values& values, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {  // -1 to -1/2, or 1/2 to 1
      const double value = values.get(i);
      values.set(i, (value < 0 ? -0.5 : 0.5) + value / 2);
    }
  };
  spread(c.keys, 0, c.keys.view.elements());
  for (int64_t row = 0; row < c.count_rows(); ++row) {
    spread(c.qkv, row * c.width() + shape.heads * shape.head_dim, c.kv_width());
  }
  const FinalPages pages(c);
  const auto dot = [&](const float* a, const float* b) {
    return std::inner_product(a, a + shape.head_dim, b, 0.0);
  };
  for (size_t s = 0; s < lengths.size(); ++s) {
    for (int64_t i = 0; i < lengths[s].new_ones; ++i) {
      const int64_t position = lengths[s].all - lengths[s].new_ones + i;
      for (int64_t head = 0; head < shape.heads; ++head) {
        const Deciding which = deciding_keys(c, s, position, head);
        const float* const key = pages.key(c.slot(s, which.key), head / c.group());
        const float* const other =
            which.outside < 0 ? nullptr : pages.key(which.outside, head / c.group());
        // query = a x key + b x other, of which both have the same product with the query.
        const double score = kDecidingScore * std::sqrt(double(shape.head_dim));
        double a = score / dot(key, key), b = 0;
        if (other) {
          const double kk = dot(key, key), oo = dot(other, other), ko = dot(key, other);
          a = score * (oo - ko) / (kk * oo - ko * ko), b = score * (kk - ko) / (kk * oo - ko * ko);
        }
        std::vector<float> query;
        for (int64_t d = 0; d < shape.head_dim; ++d) {
          query.push_back(float(a * double(key[d]) + (other ? b * double(other[d]) : 0)));
        }
        pages.rotate(query, position, -1);
        const int64_t at = (c.first_row(s) + i) * c.width() + head * shape.head_dim;
        for (int64_t d = 0; d < shape.head_dim; ++d) c.qkv.set(at + d, double(query[size_t(d)]));
      }
    }
  }
  return c;
}

/// Results in double of queries and keys as stored, and bounds for each row and head.
class PagedReference {
 public:
  explicit PagedReference(const PagedCase& c)
      : c_(c), pages_(c), results_(size_t(c.count_rows() * c.shape.heads)) {
    const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 16);
    std::vector<std::jthread> all;
    for (int64_t first = 0; first < threads; ++first) {
      all.emplace_back([this, first, threads] {
        for (int64_t i = first; i < int64_t(results_.size()); i += threads) compute(i);
      });
    }
  }

  /// Largest distance of a row's head from its result, in bounds.
  double error_of(const std::vector<std::byte>& found) const {
    const int64_t dim = c_.shape.head_dim;
    if (found.size() != results_.size() * size_t(dim) * size_of(c_.dtype())) return INFINITY;
    Values copied(Exec{}, c_.dtype(), {int64_t(results_.size()), dim});
    std::memcpy(copied.memory.data(), found.data(), found.size());
    double worst = 0;
    for (size_t i = 0; i < results_.size(); ++i) {
      double squares = 0;
      for (int64_t d = 0; d < dim; ++d) {
        const double error = copied.get(int64_t(i) * dim + d) - results_[i].out[size_t(d)];
        squares += error * error;
      }
      const double error = std::sqrt(squares) / results_[i].bound;
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
    return worst;
  }
  /// Smallest distance of a result with a mistake from the right one, in bounds: without the
  /// deciding key, with the one outside the mask, with a neighbor instead of the deciding key, and
  /// with the key of another page.
  double nearest_mistake() const {
    double nearest = INFINITY;
    for (const Result& result : results_) nearest = std::min(nearest, result.nearest_mistake);
    return nearest;
  }

 private:
  struct Result {
    std::vector<double> out;
    double bound = 0, nearest_mistake = INFINITY;
  };

  double dot(const float* a, const float* b) const {
    double lanes[8] = {};
    for (int64_t d = 0; d < c_.shape.head_dim; d += 8) {
      for (int64_t l = 0; l < 8; ++l) lanes[l] += double(a[d + l]) * double(b[d + l]);
    }
    return std::accumulate(std::begin(lanes), std::end(lanes), 0.0);
  }

  void compute(int64_t number) {
    const int64_t row = number / c_.shape.heads, head = number % c_.shape.heads;
    size_t s = 0;
    int64_t i = row;
    while (i >= c_.lengths[s].new_ones) i -= c_.lengths[s++].new_ones;
    const int64_t position = c_.lengths[s].all - c_.lengths[s].new_ones + i;
    const int64_t kv_head = head / c_.group(), dim = c_.shape.head_dim;
    const int64_t first = c_.first_key(position);
    std::vector<float> query(static_cast<size_t>(dim));
    pages_.rotate(row * c_.width() + head * dim, position, 1, query.data());
    const auto score = [&](int64_t slot) {
      return dot(query.data(), pages_.key(slot, kv_head)) / std::sqrt(double(dim));
    };
    std::vector<double> scores;
    for (int64_t j = first; j <= position; ++j) scores.push_back(score(c_.slot(s, j)));
    const double top = *std::ranges::max_element(scores);
    Result& result = results_[size_t(number)];
    std::vector<double>& out = result.out;
    out.resize(size_t(dim));
    double total = 0, squares = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      const double weight = std::exp(scores[j] - top);
      const float* const value = pages_.value(c_.slot(s, first + int64_t(j)), kv_head);
      total += weight;
      for (int64_t d = 0; d < dim; ++d) out[size_t(d)] += weight * double(value[d]);
      squares += weight * weight * dot(value, value);
    }
    for (double& value : out) value /= total;
    result.bound = bound(scores.size(), std::sqrt(squares) / total, out);
    const Deciding which = deciding_keys(c_, s, position, head);
    const auto mistake = [&](int64_t removed, int64_t added) {
      result.nearest_mistake = std::min(
          result.nearest_mistake,
          distance(out, kv_head, total, {removed, removed < 0 ? 0 : std::exp(score(removed) - top)},
                   {added, added < 0 ? 0 : std::exp(score(added) - top)}) /
              result.bound);
    };
    const int64_t key = c_.slot(s, which.key);
    if (first < position) mistake(key, -1);
    if (which.outside >= 0) mistake(-1, which.outside);
    mistake(key, c_.slot(s, which.key > 0 ? which.key - 1 : c_.shape.max_tokens - 1));
    if (c_.pages.size() > 1) mistake(key, (key + kPageTokens) % c_.slots());
  }

  struct Weighted {
    int64_t slot;
    double weight;
  };
  /// Distance of `out`, a mean of values whose weights have the sum `total`, from the mean with one
  /// value removed and one added.
  double distance(const std::vector<double>& out, int64_t kv_head, double total,
                  const Weighted& removed, const Weighted& added) const {
    double squares = 0;
    for (size_t d = 0; d < out.size(); ++d) {
      double sum = 0;  // of the change's parts
      if (removed.slot >= 0) {
        sum -= removed.weight * (double(pages_.value(removed.slot, kv_head)[d]) - out[d]);
      }
      if (added.slot >= 0) {
        sum += added.weight * (double(pages_.value(added.slot, kv_head)[d]) - out[d]);
      }
      squares += sum * sum;
    }
    return std::sqrt(squares) / std::abs(total - removed.weight + added.weight);
  }

  /// Four standard deviations of the distance from the result. bf16: each weight is rounded, with a
  /// relative error in [-2^-9, 2^-9] that all elements share; then each element. Keys and queries
  /// are rounded as in the reference. f32: products of up to 256 elements, scores of up to
  /// kDecidingScore, are within 2^-15; the sum of `count` weights loses bits at random.
  double bound(size_t count, double root_of_squares, const std::vector<double>& out) const {
    const bool is_bf16 = c_.dtype() == DType::bf16;
    const double of_weights = is_bf16 ? 0x1p-9 / std::sqrt(3) : 0x1p-15;
    const double of_element =
        is_bf16 ? 0x1p-9 / std::sqrt(3) : (1 + std::sqrt(double(count))) * 0x1p-24;
    double squares = std::pow(of_weights * root_of_squares, 2);
    for (const double value : out) squares += std::pow(of_element * value, 2);
    return 4 * std::sqrt(squares);
  }

  const PagedCase& c_;
  FinalPages pages_;
  std::vector<Result> results_;
};

/// Decisive cases of one size of heads: sequences of up to `max_tokens`, windows, and groups of
/// heads.
inline std::vector<PagedCase> decisive_cases(DType dtype, int64_t head_dim, int64_t max_tokens) {
  struct Sizes {
    int64_t kv_heads, group, max_tokens, window;
    std::vector<Lengths> lengths;
  };
  const std::vector<Lengths> small = {{65, 1}, {64, 64}, {129, 129}, {2, 2}, {1, 1}, {200, 70}};
  const std::vector<Lengths> middle = {{4096, 1}, {4097, 33}, {5000, 70}};
  std::vector<Sizes> all = {{2, 1, 300, 0, small},
                            {2, 4, 5056, 0, middle},
                            {1, 7, 5056, 1000, middle},
                            {1, 2, 16500, 0, {{16384, 66}, {16385, 1}}},
                            {1, 8, 32768, 0, {{32768, 1}, {32701, 9}}},
                            {1, 2, 32768, 4096, {{32767, 130}}}};
  for (const int64_t window : {1, 2, 63, 64, 65, 129}) all.push_back({1, 3, 300, window, small});
  std::vector<PagedCase> cases;
  for (const Sizes& s : all) {
    if (s.max_tokens > max_tokens) continue;
    const PagedShape shape{s.kv_heads * s.group, s.kv_heads, head_dim, 0, s.max_tokens};
    cases.push_back(decisive_case(cases.size(), dtype, shape, s.window, s.lengths));
  }
  return cases;
}

/// Rows of a decode step, of sequences whose lengths are around those of pages and of a warp's
/// keys.
inline PagedCase draw_few(uint64_t trial) {
  Draw draw{trial};
  const int32_t edges[] = {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 500, 1000, 1023};
  const int64_t groups[] = {1, 4, 5, 8, 3, 16}, windows[] = {0, 0, 0, 1, 16, 17, 65, 700};
  PagedShape shape{};
  shape.head_dim = trial % 2 == 0 ? 128 : 64;
  shape.kv_heads = 1 + draw.up_to(3);
  shape.heads = shape.kv_heads * groups[trial / 2 % 6];
  shape.max_tokens = 1024;
  std::vector<Lengths> lengths;
  const int64_t rows = 1 + draw.up_to(kManySingles - 1);
  for (int64_t s = 0; s < rows; ++s) {
    const auto any = int32_t(1 + draw.up_to(shape.max_tokens));
    lengths.push_back({draw.up_to(3) == 0 ? any : edges[draw.up_to(16)], 1});
  }
  return decisive_case(trial, DType::bf16, shape, windows[draw.up_to(8)], lengths);
}

}  // namespace tandem::test
