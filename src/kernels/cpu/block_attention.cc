#include "kernels/cpu/block_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu/parallel.h"
#include "gemm/cpu/small_gemm.h"
#include "kernels/cpu/attention_rows.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

using schedule::Range;

/// Sizes of a block, padded to lanes.
struct BlockSizes {
  explicit BlockSizes(const BlockShape& shape)
      : keys(round_to_lanes(shape.max_keys)),
        score_row(keys + kLanes),
        head(round_to_lanes(shape.head_dim)) {}
  size_t queries() const { return size_t(kQueryBlock * head); }
  size_t rows() const { return size_t(keys * head); }
  size_t transposed() const { return size_t(score_row * head); }
  size_t scores() const { return size_t(kQueryBlock * score_row); }
  int64_t keys, score_row, head;
};

/// Scratch of one thread: all f32, zero beyond the real head_dim.
struct BlockScratch {
  explicit BlockScratch(const BlockSizes& sizes)
      : q(sizes.queries()),
        dout(q.size()),
        block(q.size()),
        k(sizes.rows()),
        v(k.size()),
        dk(k.size()),
        dv(k.size()),
        k_transposed(sizes.transposed()),
        v_transposed(k_transposed.size()),
        scores(sizes.scores()),
        dscores(scores.size()) {}
  static size_t bytes(const BlockSizes& sizes) {
    return sizeof(float) *
           (3 * sizes.queries() + 4 * sizes.rows() + 2 * sizes.transposed() + 2 * sizes.scores());
  }
  std::vector<float> q, dout, block, k, v, dk, dv, k_transposed, v_transposed, scores, dscores;
};

}  // namespace

void merge_partial(float* out, float& log_sum, const float* partial, float partial_log_sum,
                   int64_t columns) {
  constexpr float kNoKeys = -std::numeric_limits<float>::infinity();
  if (partial_log_sum == kNoKeys) return;
  if (log_sum == kNoKeys) {
    std::copy_n(partial, columns, out);
    log_sum = partial_log_sum;
    return;
  }
  const float largest = std::max(log_sum, partial_log_sum);
  const float before = std::exp(log_sum - largest), added = std::exp(partial_log_sum - largest);
  const float sum = before + added, old_weight = before / sum, new_weight = added / sum;
#pragma omp simd
  for (int64_t i = 0; i < columns; ++i) out[i] = old_weight * out[i] + new_weight * partial[i];
  log_sum = largest + std::log(sum);
}

class BlockAttention::Impl {
 public:
  explicit Impl(const BlockShape& shape)
      : shape_(shape),
        score_row_(BlockSizes(shape).score_row),
        head_(BlockSizes(shape).head),
        scale_(float(1 / std::sqrt(double(shape.head_dim)))),
        cap_(float(shape.softcap)),
        scratch_(size_t(omp_get_max_threads()), BlockScratch(BlockSizes(shape))) {}

  /// Calls body(scratch, sequence, kv_head) for all of them.
  template <typename Body>
  void for_each_head(const Body& body) {
    const int64_t count = shape_.batch * shape_.kv_heads;
    const int64_t num_tasks = std::min<int64_t>(int64_t(scratch_.size()), count);
    parallel_ranges(num_tasks, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        for (int64_t i = count * task / num_tasks; i < count * (task + 1) / num_tasks; ++i) {
          body(scratch_[size_t(task)], i / shape_.kv_heads, i % shape_.kv_heads);
        }
      }
    });
  }

  template <typename T>
  void forward_head(BlockScratch& s, const AttentionBlock& b, int64_t sequence, int64_t kv_head,
                    const ChunkRows& out, const ChunkRows& log_sums) {
    load_keys<T>(s, b, sequence, kv_head);
    for_each_query<T>(
        s, b, sequence, kv_head, [&](bool tail, int64_t row, int64_t head, const Keys& keys) {
          score(s, keys);
          float inverse[kQueryBlock], sums[kQueryBlock];
          for (int64_t i = 0; i < keys.queries; ++i) {
            float largest;
            const float sum = exponentials(s.scores.data() + i * score_row_, keys.row(i), largest);
            inverse[i] = sum > 0 ? 1 / sum : 0;
            sums[i] = sum > 0 ? largest + std::log(sum) : -std::numeric_limits<float>::infinity();
          }
          small_gemm(keys.queries, head_, keys.count, s.scores.data(), score_row_, 1,
                     s.v.data() + keys.begin * head_, head_, s.block.data(), head_, false);
          const Tensor &to = tail ? out.tail : out.head,
                       &to_sums = tail ? log_sums.tail : log_sums.head;
          for (int64_t i = 0; i < keys.queries; ++i) {
            float* const partial = s.block.data() + i * head_;
#pragma omp simd
            for (int64_t d = 0; d < shape_.head_dim; ++d) partial[d] *= inverse[i];
            merge_partial(at_mutable<float>(to, row + i, head * shape_.head_dim),
                          *at_mutable<float>(to_sums, row + i, head), partial, sums[i],
                          shape_.head_dim);
          }
        });
  }

  template <typename T>
  void backward_head(BlockScratch& s, const AttentionBlock& b, int64_t sequence, int64_t kv_head,
                     const Gradients& g) {
    const int64_t num_keys = load_keys<T>(s, b, sequence, kv_head);
    transpose(s.v.data(), head_, round_to_lanes(num_keys), head_, s.v_transposed.data(),
              score_row_);
    std::fill_n(s.dk.begin(), num_keys * head_, 0.0f);
    std::fill_n(s.dv.begin(), num_keys * head_, 0.0f);
    for_each_query<T>(s, b, sequence, kv_head,
                      [&](bool tail, int64_t row, int64_t head, const Keys& keys) {
                        backward_queries<T>(s, g, tail, row, head, keys);
                      });
    int64_t key = 0;
    const auto add = [&](const Range& positions, const Tensor& dk, const Tensor& dv) {
      for (int64_t i = 0; i < positions.count; ++i, ++key) {
        const int64_t row = sequence * positions.count + i, column = kv_head * shape_.head_dim;
        add_row(s.dk.data() + key * head_, at_mutable<float>(dk, row, column));
        add_row(s.dv.data() + key * head_, at_mutable<float>(dv, row, column));
      }
    };
    add(b.rows.keys.head, g.dk.head, g.dv.head);
    add(b.rows.keys.tail, g.dk.tail, g.dv.tail);
  }

 private:
  /// Keys of a block that some queries read, from a multiple of kLanes on; scores are indexed from
  /// there.
  struct Keys {
    int64_t queries = 0, begin = 0, count = 0, padded = 0;
    Range read[kQueryBlock] = {};  ///< by query, of the block's keys
    Row row(int64_t i) const { return Row(read[i].begin - begin, read[i].end() - begin, padded); }
  };

  static Keys find_keys(const AttentionBlock& b, const int32_t* starts, int64_t position,
                        int64_t queries) {
    Keys keys;
    keys.queries = queries;
    int64_t first = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t i = 0; i < queries; ++i) {
      Range& read = keys.read[i];
      read = {0, b.rows.keys.count()};
      if (b.mask.causal) {
        const int64_t p = position + i;
        const int64_t from = std::max<int64_t>(b.mask.first_key(p), starts ? starts[p] : 0);
        read.begin = b.rows.keys.rows_before(from);
        read.count = b.rows.keys.rows_before(p + 1) - read.begin;
      }
      if (read.count <= 0) continue;
      first = std::min(first, read.begin);
      end = std::max(end, read.end());
    }
    if (end == 0) return keys;
    keys.begin = first / kLanes * kLanes;
    keys.count = end - keys.begin;
    keys.padded = round_to_lanes(keys.count);
    return keys;
  }

  /// Calls body(is the tail, row, head, keys) for blocks of queries of one chunk that read keys;
  /// their queries are loaded.
  template <typename T, typename Body>
  void for_each_query(BlockScratch& s, const AttentionBlock& b, int64_t sequence, int64_t kv_head,
                      const Body& body) {
    const int64_t group = shape_.heads / shape_.kv_heads;
    const int32_t* starts = b.document_starts ? b.document_starts + sequence * b.seq : nullptr;
    for (const bool tail : {false, true}) {
      const Range& chunk = tail ? b.rows.queries.tail : b.rows.queries.head;
      const Tensor& q = tail ? b.q.tail : b.q.head;
      for (int64_t first = 0; first < chunk.count; first += kQueryBlock) {
        const int64_t queries = std::min(kQueryBlock, chunk.count - first);
        const Keys keys = find_keys(b, starts, chunk.begin + first, queries);
        if (keys.count == 0) continue;
        const int64_t row = sequence * chunk.count + first;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          for (int64_t i = 0; i < queries; ++i) {
            load(at<T>(q, row + i, head * shape_.head_dim), scale_, s.q.data() + i * head_);
          }
          body(tail, row, head, keys);
        }
      }
    }
  }

  template <typename T>
  void load(const T* from, float scale, float* to) const {
#pragma omp simd
    for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = scale * to_f32(from[d]);
  }
  void add_row(const float* from, float* to) const {
#pragma omp simd
    for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] += from[d];
  }

  template <typename T>
  int64_t load_keys(BlockScratch& s, const AttentionBlock& b, int64_t sequence, int64_t kv_head) {
    int64_t key = 0;
    const auto load_chunk = [&](const Range& positions, const Tensor& k, const Tensor& v) {
      for (int64_t i = 0; i < positions.count; ++i, ++key) {
        const int64_t row = sequence * positions.count + i, column = kv_head * shape_.head_dim;
        prefetch(at<T>(k, row, column), k.stride(0), shape_.head_dim);
        prefetch(at<T>(v, row, column), v.stride(0), shape_.head_dim);
        load(at<T>(k, row, column), 1.0f, s.k.data() + key * head_);
        load(at<T>(v, row, column), 1.0f, s.v.data() + key * head_);
      }
    };
    load_chunk(b.rows.keys.head, b.k.head, b.v.head);
    load_chunk(b.rows.keys.tail, b.k.tail, b.v.tail);
    transpose(s.k.data(), head_, round_to_lanes(key), head_, s.k_transposed.data(), score_row_);
    return key;
  }

  void score(BlockScratch& s, const Keys& keys) {
    small_gemm(keys.queries, keys.padded, shape_.head_dim, s.q.data(), head_, 1,
               s.k_transposed.data() + keys.begin, score_row_, s.scores.data(), score_row_, false);
    if (cap_ == 0) return;
    for (int64_t i = 0; i < keys.queries; ++i) {
      cap(s.scores.data() + i * score_row_, keys.padded, cap_);
    }
  }

  template <typename T>
  void backward_queries(BlockScratch& s, const Gradients& g, bool tail, int64_t row, int64_t head,
                        const Keys& keys) {
    const Tensor &dout = tail ? g.dout.tail : g.dout.head, &dq = tail ? g.dq.tail : g.dq.head;
    const Tensor& log_sums = tail ? g.log_sums.tail : g.log_sums.head;
    const Tensor& delta = tail ? g.delta.tail : g.delta.head;
    const int64_t rows = keys.queries, column = head * shape_.head_dim;
    for (int64_t i = 0; i < rows; ++i) {
      load(at<T>(dout, row + i, column), 1.0f, s.dout.data() + i * head_);
    }
    score(s, keys);
    small_gemm(rows, keys.padded, shape_.head_dim, s.dout.data(), head_, 1,
               s.v_transposed.data() + keys.begin, score_row_, s.dscores.data(), score_row_, false);
    for (int64_t i = 0; i < rows; ++i) {
      float *const scores = s.scores.data() + i * score_row_, *const dscores =
                                                                  s.dscores.data() + i * score_row_;
      const float log_sum = *at<float>(log_sums, row + i, head),
                  dot = *at<float>(delta, row + i, head);
      cap_ > 0 ? capped_softmax_backward(scores, dscores, keys.row(i), log_sum, dot, cap_)
               : softmax_backward(scores, dscores, keys.row(i), log_sum, dot);
    }
    const int64_t first_key = keys.begin * head_;
    small_gemm(keys.count, head_, rows, s.scores.data(), 1, score_row_, s.dout.data(), head_,
               s.dv.data() + first_key, head_, true);
    small_gemm(keys.count, head_, rows, s.dscores.data(), 1, score_row_, s.q.data(), head_,
               s.dk.data() + first_key, head_, true);
    small_gemm(rows, head_, keys.count, s.dscores.data(), score_row_, 1, s.k.data() + first_key,
               head_, s.block.data(), head_, false);
    for (int64_t i = 0; i < rows; ++i) {
      float* const partial = s.block.data() + i * head_;
#pragma omp simd
      for (int64_t d = 0; d < shape_.head_dim; ++d) partial[d] *= scale_;
      add_row(partial, at_mutable<float>(dq, row + i, column));
    }
  }

  BlockShape shape_;
  int64_t score_row_, head_;
  float scale_;
  float cap_;  // of scores; 0: none
  std::vector<BlockScratch> scratch_;
};

BlockAttention::BlockAttention(const BlockShape& shape) : impl_(std::make_unique<Impl>(shape)) {}
BlockAttention::~BlockAttention() = default;

size_t BlockAttention::bytes(const BlockShape& shape) {
  return size_t(omp_get_max_threads()) * BlockScratch::bytes(BlockSizes(shape));
}

void BlockAttention::forward(const AttentionBlock& block, const ChunkRows& out,
                             const ChunkRows& log_sums) {
  const ScopedSpan span(SpanKind::compute, "attention_block");
  with_type(block.q.head.dtype(), "attention_block", [&]<typename T>(T) {
    impl_->for_each_head([&](auto& scratch, int64_t sequence, int64_t kv_head) {
      impl_->template forward_head<T>(scratch, block, sequence, kv_head, out, log_sums);
    });
  });
}

void BlockAttention::backward(const AttentionBlock& block, const Gradients& gradients) {
  const ScopedSpan span(SpanKind::compute, "attention_block_backward");
  with_type(block.q.head.dtype(), "attention_block_backward", [&]<typename T>(T) {
    impl_->for_each_head([&](auto& scratch, int64_t sequence, int64_t kv_head) {
      impl_->template backward_head<T>(scratch, block, sequence, kv_head, gradients);
    });
  });
}

}  // namespace tandem::cpu
