#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu/parallel.h"
#include "gemm/cpu/small_gemm.h"
#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/rope.h"
#include "observe/recorder.h"

namespace tandem::cpu {
namespace {

/// Sizes of one thread's scratch. Rows are padded by one vector more than necessary so that columns
/// of a transposed block do not share cache sets.
struct Layout {
  explicit Layout(const AttentionShape& shape)
      : seq(cpu::round_to_lanes(shape.seq)),
        score_row(seq + cpu::kLanes),
        head(cpu::round_to_lanes(shape.head_dim)) {}
  int64_t seq, score_row, head;
};

/// Scratch of one thread: all f32, zero beyond the real head_dim and seq.
struct Scratch {
  explicit Scratch(const Layout& l)
      : q(size_t(kQueryBlock * l.head)),
        dout(q.size()),
        block(q.size()),
        k(size_t(l.seq * l.head)),
        v(k.size()),
        dk(k.size()),
        dv(k.size()),
        k_transposed(size_t(l.score_row * l.head)),
        v_transposed(k_transposed.size()),
        scores(size_t(kQueryBlock * l.score_row)),
        dscores(scores.size()) {}
  std::vector<float> q, dout, block, k, v, dk, dv, k_transposed, v_transposed, scores, dscores;
};

/// Document of a sequence, or all of it.
struct Document {
  int64_t sequence;
  int64_t begin;   ///< position in the sequence
  int64_t length;  ///< positions
  int64_t row;     ///< of q, k, v and out at its begin
};

/// Keys that a block of queries reads, from a multiple of kLanes on; scores are indexed from there.
struct Block {
  /// Queries [first, first + rows), each of which reads itself and up to window - 1 keys before it;
  /// window 0: all before it.
  Block(int64_t first_, int64_t rows_, int64_t window_)
      : first(first_),
        rows(rows_),
        window(window_ > 0 ? window_ : first_ + rows_),
        begin(std::max<int64_t>(0, first - window + 1) / cpu::kLanes * cpu::kLanes),
        count(first + rows - begin),
        padded(cpu::round_to_lanes(count)) {}
  Row row(int64_t i) const {
    const int64_t end = first + i + 1;
    return Row(std::max<int64_t>(0, end - window - begin), end - begin, padded);
  }
  int64_t first, rows, window;
  int64_t begin;   ///< first key
  int64_t count;   ///< keys
  int64_t padded;  ///< scores in a row
};

}  // namespace

class Attention::Impl {
 public:
  Impl(const AttentionShape& shape, const RopeTable& rope)
      : shape_(shape),
        layout_(shape),
        rope_(rope),
        scale_(float(1 / std::sqrt(double(shape.head_dim)))),
        cap_(float(shape.softcap)),
        scratch_(size_t(omp_get_max_threads()), Scratch(layout_)) {}

  struct Forward {
    const Tensor &q, &k, &v, &out, &log_sums;
    const AttentionMask& mask;
  };
  struct Backward {
    const Tensor &dout, &dq, &dk, &dv;
  };

  /// Calls body(scratch, document, kv_head) for all documents and heads. Those of a head of a
  /// sequence are on one thread.
  template <typename Body>
  void for_each_head(const AttentionMask& mask, const Body& body) {
    const int64_t count = shape_.batch * shape_.kv_heads;
    const int64_t num_tasks = std::min<int64_t>(int64_t(scratch_.size()), count);
    cpu::parallel_ranges(num_tasks, 1, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        for (int64_t i = count * task / num_tasks; i < count * (task + 1) / num_tasks; ++i) {
          for_each_document(mask, i / shape_.kv_heads, [&](const Document& document) {
            body(scratch_[size_t(task)], document, i % shape_.kv_heads);
          });
        }
      }
    });
  }

  template <typename Body>
  void for_each_document(const AttentionMask& mask, int64_t sequence, const Body& body) const {
    const int64_t row = sequence * shape_.seq;
    const bool is_one = mask.document_starts.dims() == 0;
    const int32_t* starts = is_one ? nullptr : mask.document_starts.as<int32_t>() + row;
    for (int64_t begin = 0, end = 0; begin < shape_.seq; begin = end) {
      for (end = is_one ? shape_.seq : begin + 1; end < shape_.seq && starts[end] != end;) ++end;
      body({sequence, begin, end - begin, row + begin});
    }
  }

  template <typename T>
  void forward_head(Scratch& s, const Document& document, int64_t kv_head, const Forward& f) {
    load_keys<T>(s, document, kv_head, f);
    const int64_t group = shape_.heads / shape_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      float* log_sums = f.log_sums.as<float>() + log_sum_offset(document, head);
      for (int64_t first = 0; first < document.length; first += kQueryBlock) {
        const Block block(first, std::min(kQueryBlock, document.length - first), f.mask.window);
        const int64_t rows = block.rows;
        load_queries<T>(s, document, head, first, rows, f);
        score(s, block);
        float inverse[kQueryBlock];
        for (int64_t i = 0; i < rows; ++i) {
          float largest;
          const float sum =
              exponentials(s.scores.data() + i * layout_.score_row, block.row(i), largest);
          inverse[i] = 1 / sum;
          log_sums[first + i] = largest + std::log(sum);
        }
        cpu::small_gemm(rows, layout_.head, block.count, s.scores.data(), layout_.score_row, 1,
                        s.v.data() + block.begin * layout_.head, layout_.head, s.block.data(),
                        layout_.head, false);
        for (int64_t i = 0; i < rows; ++i) {
          T* out = at_mutable<T>(f.out, document.row + first + i, head * shape_.head_dim);
          store(s.block.data() + i * layout_.head, inverse[i], out);
        }
      }
    }
  }

  template <typename T>
  void backward_head(Scratch& s, const Document& document, int64_t kv_head, const Forward& f,
                     const Backward& b) {
    load_keys<T>(s, document, kv_head, f);
    cpu::transpose(s.v.data(), layout_.head, cpu::round_to_lanes(document.length), layout_.head,
                   s.v_transposed.data(), layout_.score_row);
    std::fill_n(s.dk.begin(), document.length * layout_.head, 0.0f);
    std::fill_n(s.dv.begin(), document.length * layout_.head, 0.0f);
    const int64_t group = shape_.heads / shape_.kv_heads;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for (int64_t first = 0; first < document.length; first += kQueryBlock) {
        backward_block<T>(s, document, head, first, f, b);
      }
    }
    for (int64_t p = 0; p < document.length; ++p) {
      const int64_t row = document.row + p, column = kv_head * shape_.head_dim;
      cpu::rotate_back(s.dk.data() + p * layout_.head, rope_.cos(p), rope_.sin(p), rope_.half(),
                       1.0f, at_mutable<T>(b.dk, row, column));
      store(s.dv.data() + p * layout_.head, 1.0f, at_mutable<T>(b.dv, row, column));
    }
  }

 private:
  int64_t log_sum_offset(const Document& document, int64_t head) const {
    return (document.sequence * shape_.heads + head) * shape_.seq + document.begin;
  }
  template <typename T>
  void store(const float* from, float scale, T* to) {
#pragma omp simd
    for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = cpu::from_f32<T>(scale * from[d]);
  }
  template <typename T>
  void load(const T* from, float* to) {
#pragma omp simd
    for (int64_t d = 0; d < shape_.head_dim; ++d) to[d] = cpu::to_f32(from[d]);
  }

  template <typename T>
  void load_keys(Scratch& s, const Document& document, int64_t kv_head, const Forward& f) {
    for (int64_t p = 0; p < document.length; ++p) {
      const int64_t row = document.row + p, column = kv_head * shape_.head_dim;
      prefetch(at<T>(f.k, row, column), f.k.stride(0), shape_.head_dim);
      prefetch(at<T>(f.v, row, column), f.v.stride(0), shape_.head_dim);
      cpu::rotate(at<T>(f.k, row, column), rope_.cos(p), rope_.sin(p), rope_.half(), 1.0f,
                  s.k.data() + p * layout_.head);
      load(at<T>(f.v, row, column), s.v.data() + p * layout_.head);
    }
    cpu::transpose(s.k.data(), layout_.head, cpu::round_to_lanes(document.length), layout_.head,
                   s.k_transposed.data(), layout_.score_row);
  }

  template <typename T>
  void load_queries(Scratch& s, const Document& document, int64_t head, int64_t first, int64_t rows,
                    const Forward& f) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t p = first + i;
      const T* q = at<T>(f.q, document.row + p, head * shape_.head_dim);
      prefetch(q, f.q.stride(0), shape_.head_dim);
      cpu::rotate(q, rope_.cos(p), rope_.sin(p), rope_.half(), scale_,
                  s.q.data() + i * layout_.head);
    }
  }

  void score(Scratch& s, const Block& block) {
    cpu::small_gemm(block.rows, block.padded, shape_.head_dim, s.q.data(), layout_.head, 1,
                    s.k_transposed.data() + block.begin, layout_.score_row, s.scores.data(),
                    layout_.score_row, false);
    if (cap_ > 0) cap_rows(s, block);
  }
  void cap_rows(Scratch& s, const Block& block) {
    for (int64_t i = 0; i < block.rows; ++i) {
      cpu::cap(s.scores.data() + i * layout_.score_row, block.padded, cap_);
    }
  }
  void softmax_backward_rows(Scratch& s, const Block& block, const float* log_sums,
                             const float* delta) {
    for (int64_t i = 0; i < block.rows; ++i) {
      float *const scores = s.scores.data() + i * layout_.score_row, *const dscores =
                                                                         s.dscores.data() +
                                                                         i * layout_.score_row;
      cap_ > 0 ? capped_softmax_backward(scores, dscores, block.row(i), log_sums[i], delta[i], cap_)
               : softmax_backward(scores, dscores, block.row(i), log_sums[i], delta[i]);
    }
  }

  template <typename T>
  void backward_block(Scratch& s, const Document& document, int64_t head, int64_t first,
                      const Forward& f, const Backward& b) {
    const Block block(first, std::min(kQueryBlock, document.length - first), f.mask.window);
    const int64_t rows = block.rows, column = head * shape_.head_dim;
    const float* log_sums = f.log_sums.as<float>() + log_sum_offset(document, head) + first;
    load_queries<T>(s, document, head, first, rows, f);
    float delta[kQueryBlock];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = document.row + first + i;
      const T* dout = at<T>(b.dout, row, column);
      prefetch(dout, b.dout.stride(0), shape_.head_dim);
      prefetch(at<T>(f.out, row, column), f.out.stride(0), shape_.head_dim);
      delta[i] = dot(dout, at<T>(f.out, row, column), shape_.head_dim);
      load(dout, s.dout.data() + i * layout_.head);
    }
    score(s, block);
    cpu::small_gemm(rows, block.padded, shape_.head_dim, s.dout.data(), layout_.head, 1,
                    s.v_transposed.data() + block.begin, layout_.score_row, s.dscores.data(),
                    layout_.score_row, false);
    softmax_backward_rows(s, block, log_sums, delta);
    const int64_t first_key = block.begin * layout_.head;
    cpu::small_gemm(block.count, layout_.head, rows, s.scores.data(), 1, layout_.score_row,
                    s.dout.data(), layout_.head, s.dv.data() + first_key, layout_.head, true);
    cpu::small_gemm(block.count, layout_.head, rows, s.dscores.data(), 1, layout_.score_row,
                    s.q.data(), layout_.head, s.dk.data() + first_key, layout_.head, true);
    cpu::small_gemm(rows, layout_.head, block.count, s.dscores.data(), layout_.score_row, 1,
                    s.k.data() + first_key, layout_.head, s.block.data(), layout_.head, false);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t p = first + i;
      cpu::rotate_back(s.block.data() + i * layout_.head, rope_.cos(p), rope_.sin(p), rope_.half(),
                       scale_, at_mutable<T>(b.dq, document.row + p, column));
    }
  }

  AttentionShape shape_;
  Layout layout_;
  const RopeTable& rope_;
  float scale_;
  float cap_;  // of scores; 0: none
  std::vector<Scratch> scratch_;
};

Attention::Attention(const AttentionShape& shape, const RopeTable& rope)
    : impl_(std::make_unique<Impl>(shape, rope)) {}
Attention::~Attention() = default;

void Attention::forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& log_sums, const AttentionMask& mask) {
  const ScopedSpan span(SpanKind::compute, "attention");
  cpu::with_type(q.dtype(), "attention", [&]<typename T>(T) {
    impl_->for_each_head(mask, [&](auto& scratch, const Document& document, int64_t kv_head) {
      impl_->template forward_head<T>(scratch, document, kv_head, {q, k, v, out, log_sums, mask});
    });
  });
}

void Attention::backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                         const Tensor& log_sums, const Tensor& dout, const Tensor& dq,
                         const Tensor& dk, const Tensor& dv, const AttentionMask& mask) {
  const ScopedSpan span(SpanKind::compute, "attention_backward");
  cpu::with_type(q.dtype(), "attention_backward", [&]<typename T>(T) {
    impl_->for_each_head(mask, [&](auto& scratch, const Document& document, int64_t kv_head) {
      impl_->template backward_head<T>(scratch, document, kv_head, {q, k, v, out, log_sums, mask},
                                       {dout, dq, dk, dv});
    });
  });
}

}  // namespace tandem::cpu
