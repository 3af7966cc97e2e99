#include <algorithm>
#include <cmath>

#include "core/cpu/parallel.h"
#include "kernels/cpu/fast_tanh.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/rope.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

/// Min pairs of a row and a head per thread.
constexpr int64_t kMinPairs = 16;

/// Scratch of one thread.
struct PagedScratch {
  static int64_t elements(const PagedShape& shape) {
    return round_to_line(shape.max_tokens) + 2 * round_to_line(shape.head_dim);
  }
  PagedScratch(const PagedShape& shape, float* memory)
      : scores(memory),
        query(scores + round_to_line(shape.max_tokens)),
        sum(query + round_to_line(shape.head_dim)) {}
  float *scores, *query, *sum;

 private:
  /// Threads do not share a cache line.
  static int64_t round_to_line(int64_t elements) { return (elements + 15) / 16 * 16; }
};

template <typename T, typename P>
class PagedRun {
 public:
  PagedRun(const PagedShape& shape, const RopeTable& rope, int64_t window, const PagedRows& rows,
           const PagedTensors& tensors)
      : shape_(shape), rope_(rope), window_(window), rows_(rows), t_(tensors) {}

  /// Writes the rotated key and the value of a row to its page.
  void append(int64_t row) const {
    if (sequence(row) < 0) return;
    const int64_t p = position(row);
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t column = head * shape_.head_dim, slot = offset(sequence(row), p, head);
      P* const key = t_.keys.as<P>() + slot;
      P* const value = t_.values.as<P>() + slot;
      const T* const k = t_.k.as<T>() + row * t_.k.stride(0) + column;
      const T* const v = t_.v.as<T>() + row * t_.v.stride(0) + column;
      rotate(k, rope_.cos(p), rope_.sin(p), rope_.half(), 1.0f, key);
      for (int64_t d = 0; d < shape_.head_dim; ++d) value[d] = from_f32<P>(to_f32(v[d]));
    }
  }

  void attend(int64_t row, int64_t head, const PagedScratch& scratch) const {
    T* const out = t_.out.as<T>() + row * t_.out.stride(0) + head * shape_.head_dim;
    const int64_t s = sequence(row);
    if (s < 0) {
      std::fill_n(out, shape_.head_dim, from_f32<T>(0));
      return;
    }
    const int64_t p = position(row), keys = p + 1, dim = shape_.head_dim;
    const int64_t kv_head = head / (shape_.heads / shape_.kv_heads);
    const int64_t first_key = window_ > 0 ? std::max<int64_t>(0, keys - window_) : 0;
    float *const query = scratch.query, *const sum = scratch.sum;
    rotate(t_.q.as<T>() + row * t_.q.stride(0) + head * dim, rope_.cos(p), rope_.sin(p),
           rope_.half(), float(1 / std::sqrt(double(dim))), query);
    const auto cap = float(shape_.softcap);
    const bool has_sink = t_.sinks.dims() > 0;
    const float sink = has_sink ? t_.sinks.as<float>()[head] : -INFINITY;
    float largest = sink;
    for_each_slot(s, kv_head, first_key, keys, [&](int64_t j, int64_t slot) {
      const P* const key = t_.keys.as<P>() + slot;
      float score = 0;
#pragma omp simd reduction(+ : score)
      for (int64_t d = 0; d < dim; ++d) score += query[d] * to_f32(key[d]);
      if (cap > 0) score = cap * fast_tanh(score / cap);
      scratch.scores[j] = score;
      largest = std::max(largest, score);
    });
    float total = has_sink ? fast_exp(sink - largest) : 0;
    std::fill_n(sum, dim, 0.0f);
    for_each_slot(s, kv_head, first_key, keys, [&](int64_t j, int64_t slot) {
      const float weight = fast_exp(scratch.scores[j] - largest);
      const P* const value = t_.values.as<P>() + slot;
      total += weight;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * to_f32(value[d]);
    });
    for (int64_t d = 0; d < dim; ++d) out[d] = from_f32<T>(sum[d] / total);
  }

 private:
  int64_t sequence(int64_t row) const {
    return rows_.sequences.as<int32_t>()[row];
  }
  int64_t position(int64_t row) const {
    return rows_.positions.as<int32_t>()[row];
  }
  /// Element of keys and values where a token's head begins.
  int64_t offset(int64_t sequence, int64_t token, int64_t head) const {
    const int32_t page =
        rows_.pages.as<int32_t>()[sequence * rows_.pages.stride(0) + token / kPageTokens];
    return ((page * kPageTokens + token % kPageTokens) * shape_.kv_heads + head) * shape_.head_dim;
  }
  /// body(token, offset) for tokens [first, end).
  template <typename Body>
  void for_each_slot(int64_t sequence, int64_t head, int64_t first, int64_t end,
                     const Body& body) const {
    for (int64_t token = first; token < end;) {
      int64_t slot = offset(sequence, token, head);
      const int64_t page_end = std::min(end, (token / kPageTokens + 1) * kPageTokens);
      for (; token < page_end; ++token, slot += shape_.kv_heads * shape_.head_dim) {
        body(token, slot);
      }
    }
  }

  const PagedShape& shape_;
  const RopeTable& rope_;
  int64_t window_;
  const PagedRows& rows_;
  const PagedTensors& t_;
};

}  // namespace

int64_t paged_attention_scratch(const PagedShape& shape) {
  return omp_get_max_threads() * PagedScratch::elements(shape);
}

void paged_attention(const PagedShape& shape, const RopeTable& rope, int64_t window,
                     const PagedRows& rows, const PagedTensors& t) {
  const ScopedSpan span(SpanKind::compute, "paged_attention");
  const int64_t count = rows.sequences.elements(), pairs = count * shape.heads;
  const int64_t one = PagedScratch::elements(shape);
  const int64_t tasks = std::clamp<int64_t>(pairs / kMinPairs, 1, t.scratch.elements() / one);
  with_type(t.q.dtype(), "paged_attention", [&]<typename T>(T) {
    with_type(t.keys.dtype(), "paged_attention", [&]<typename P>(P) {
      const PagedRun<T, P> run(shape, rope, window, rows, t);
      parallel_ranges(count, kMinRows, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) run.append(row);
      });
      parallel_ranges(tasks, 1, [&](int64_t first, int64_t last) {
        for (int64_t task = first; task < last; ++task) {
          const PagedScratch scratch(shape, t.scratch.as<float>() + task * one);
          // Rows further down have more keys: each task takes every tasks-th pair.
          for (int64_t i = task; i < pairs; i += tasks) {
            run.attend(i / shape.heads, i % shape.heads, scratch);
          }
        }
      });
    });
  });
}

}  // namespace tandem::cpu
