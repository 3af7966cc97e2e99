#include "kernels/cached_attention.h"

#include <algorithm>
#include <cmath>

#include "core/cpu/scalar.h"
#include "kernels/cpu/rope.h"
#include "observe/recorder.h"

namespace tandem {

CachedAttention::CachedAttention(int64_t capacity, int64_t heads, int64_t kv_heads,
                                 int64_t head_dim, const RopeTable& rope, int64_t window)
    : capacity_(capacity),
      heads_(heads),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      rope_(rope),
      window_(window),
      keys_(size_t(kv_heads * capacity * head_dim)),
      values_(keys_.size()),
      scores_(static_cast<size_t>(capacity)),
      query_(static_cast<size_t>(head_dim)),
      sum_(query_.size()) {}

template <typename T>
void CachedAttention::append(const Tensor& k, const Tensor& v, int64_t position, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t p = position + i;
    for (int64_t head = 0; head < kv_heads_; ++head) {
      const int64_t slot = (head * capacity_ + p) * head_dim_;
      cpu::rotate(k.as<T>() + i * k.stride(0) + head * head_dim_, rope_.cos(p), rope_.sin(p),
                  rope_.half(), 1.0f, keys_.data() + slot);
      const T* value = v.as<T>() + i * v.stride(0) + head * head_dim_;
      for (int64_t d = 0; d < head_dim_; ++d) values_[size_t(slot + d)] = cpu::to_f32(value[d]);
    }
  }
}

template <typename T>
void CachedAttention::attend(const T* query, int64_t head, int64_t position, T* out) {
  cpu::rotate(query, rope_.cos(position), rope_.sin(position), rope_.half(),
              float(1 / std::sqrt(double(head_dim_))), query_.data());
  const int64_t first = head / (heads_ / kv_heads_) * capacity_ * head_dim_;
  const int64_t keys = position + 1;
  const int64_t first_key = window_ > 0 ? std::max<int64_t>(0, keys - window_) : 0;
  float largest = -INFINITY;
  for (int64_t j = first_key; j < keys; ++j) {
    const float* key = keys_.data() + first + j * head_dim_;
    float score = 0;
#pragma omp simd reduction(+ : score)
    for (int64_t d = 0; d < head_dim_; ++d) score += query_[size_t(d)] * key[d];
    scores_[size_t(j)] = score;
    largest = std::max(largest, score);
  }
  float total = 0;
  std::ranges::fill(sum_, 0.0f);
  for (int64_t j = first_key; j < keys; ++j) {
    const float weight = cpu::fast_exp(scores_[size_t(j)] - largest);
    const float* value = values_.data() + first + j * head_dim_;
    total += weight;
#pragma omp simd
    for (int64_t d = 0; d < head_dim_; ++d) sum_[size_t(d)] += weight * value[d];
  }
  for (int64_t d = 0; d < head_dim_; ++d) out[d] = cpu::from_f32<T>(sum_[size_t(d)] / total);
}

void CachedAttention::run(const Tensor& q, const Tensor& k, const Tensor& v, int64_t position,
                          int64_t count, const Tensor& out) {
  const ScopedSpan span(SpanKind::compute, "cached_attention");
  cpu::with_type(q.dtype(), "cached_attention", [&]<typename T>(T) {
    append<T>(k, v, position, count);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < heads_; ++head) {
        attend(q.as<T>() + i * q.stride(0) + head * head_dim_, head, position + i,
               out.as<T>() + i * out.stride(0) + head * head_dim_);
      }
    }
  });
}

}  // namespace tandem
