// Causal attention of new tokens over all previous ones, for inference: the rotated keys and the
// values of one layer are kept in a cache of fixed capacity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/rope.h"
#include "tandem/tensor.h"

namespace tandem {

class CachedAttention {
 public:
  /// rope must outlive this and cover `capacity` positions. `window`: as Attention::forward's.
  CachedAttention(int64_t capacity, int64_t heads, int64_t kv_heads, int64_t head_dim,
                  const RopeTable& rope, int64_t window = 0);
  /// Rows [0, count) of q, k, v are the tokens at `position`, position + 1, ...; rows before
  /// `position` are cached. Rows of `out` from `count` up are not written. f32 or bf16.
  void run(const Tensor& q, const Tensor& k, const Tensor& v, int64_t position, int64_t count,
           const Tensor& out);

  /// Cached rotated keys and values: [kv_heads, capacity, head_dim].
  std::span<const float> keys() const { return keys_; }
  std::span<const float> values() const { return values_; }

 private:
  template <typename T>
  void append(const Tensor& k, const Tensor& v, int64_t position, int64_t count);
  template <typename T>
  void attend(const T* query, int64_t head, int64_t position, T* out);

  int64_t capacity_, heads_, kv_heads_, head_dim_;
  const RopeTable& rope_;
  int64_t window_;
  std::vector<float> keys_, values_;
  std::vector<float> scores_, query_, sum_;
};

}  // namespace tandem
