#include "overlap/attention/rows.h"

#include <algorithm>

#include "core/cpu/parallel.h"
#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/rope.h"

namespace tandem {

using cpu::at;
using cpu::at_mutable;
using cpu::ChunkRows;
using schedule::ContextRows;

namespace {

/// Calls body(chunk, row in the chunk, row of the caller, sequence, row in the sequence).
template <typename Body>
void for_each_row(const ContextRows& rows, int64_t batch, const ChunkRows& chunks,
                  const Body& body) {
  const int64_t count = rows.count();
  cpu::parallel_ranges(batch * count, cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t sequence = row / count, i = row % count;
      const bool tail = i >= rows.head.count;
      const int64_t in_chunk =
          tail ? sequence * rows.tail.count + i - rows.head.count : sequence * rows.head.count + i;
      body(tail ? chunks.tail : chunks.head, in_chunk, row, sequence, i);
    }
  });
}

/// Calls body(head, row) for both chunks.
template <typename Body>
void for_both(const ChunkRows& a, const ChunkRows& b, const Body& body) {
  body(a.head, b.head);
  body(a.tail, b.tail);
}

int64_t angle(const AttentionMask& mask, int64_t seq, int64_t sequence, int64_t position) {
  if (mask.document_starts.dims() == 0) return position;
  return position - mask.document_starts.as<int32_t>()[sequence * seq + position];
}

}  // namespace

void ContextRowCopies::copy_in(const Tensor& from, const ContextRows& rows, int64_t first_column,
                               const ChunkRows& to) const {
  cpu::with_type(from.dtype(), "context_attention", [&]<typename T>(T) {
    for_each_row(rows, grid_.shape.batch, to,
                 [&](const Tensor& chunk, int64_t in_chunk, int64_t row, int64_t, int64_t) {
                   std::copy_n(at<T>(from, row, first_column), chunk.dim(1),
                               at_mutable<T>(chunk, in_chunk, 0));
                 });
  });
}

void ContextRowCopies::rotate_in(const Tensor& from, const ContextRows& rows, int64_t first_column,
                                 const AttentionMask& mask, const ChunkRows& to) const {
  if (!rope_) return copy_in(from, rows, first_column, to);
  cpu::with_type(from.dtype(), "context_attention", [&]<typename T>(T) {
    for_each_row(
        rows, grid_.shape.batch, to,
        [&](const Tensor& chunk, int64_t in_chunk, int64_t row, int64_t sequence, int64_t i) {
          const int64_t p = angle(mask, grid_.shape.seq, sequence, rows.position(i));
          for (int64_t c = 0; c < chunk.dim(1); c += grid_.shape.head_dim) {
            cpu::rotate(at<T>(from, row, first_column + c), rope_->cos(p), rope_->sin(p),
                        rope_->half(), 1.0f, at_mutable<T>(chunk, in_chunk, c));
          }
        });
  });
}

void ContextRowCopies::copy_out(const ChunkRows& from, const ContextRows& rows,
                                int64_t first_column, const Tensor& to) const {
  cpu::with_type(from.head.dtype(), "context_attention", [&]<typename F>(F) {
    cpu::with_type(to.dtype(), "context_attention", [&]<typename T>(T) {
      for_each_row(rows, grid_.shape.batch, from,
                   [&](const Tensor& chunk, int64_t in_chunk, int64_t row, int64_t, int64_t) {
                     const F* const source = at<F>(chunk, in_chunk, 0);
                     T* const target = at_mutable<T>(to, row, first_column);
#pragma omp simd
                     for (int64_t c = 0; c < chunk.dim(1); ++c) {
                       target[c] = cpu::from_f32<T>(cpu::to_f32(source[c]));
                     }
                   });
    });
  });
}

void ContextRowCopies::rotate_back(const ChunkRows& gradients, const ContextRows& rows,
                                   const AttentionMask& mask) const {
  if (!rope_) return;
  for_each_row(rows, grid_.shape.batch, gradients,
               [&](const Tensor& chunk, int64_t in_chunk, int64_t, int64_t sequence, int64_t i) {
                 const int64_t p = angle(mask, grid_.shape.seq, sequence, rows.position(i));
                 for (int64_t c = 0; c < chunk.dim(1); c += grid_.shape.head_dim) {
                   float* const row = at_mutable<float>(chunk, in_chunk, c);
                   cpu::rotate_back(row, rope_->cos(p), rope_->sin(p), rope_->half(), 1.0f, row);
                 }
               });
}

void ContextRowCopies::rotate_out(const ChunkRows& from, const ContextRows& rows,
                                  int64_t first_column, const AttentionMask& mask,
                                  const Tensor& to) const {
  rotate_back(from, rows, mask);
  copy_out(from, rows, first_column, to);
}

void ContextRowCopies::log_sums_out(const ChunkRows& from, const ContextRows& rows,
                                    int64_t first_head, const Tensor& log_sums) const {
  const int64_t heads = grid_.shape.heads;
  for_each_row(rows, grid_.shape.batch, from,
               [&](const Tensor& chunk, int64_t in_chunk, int64_t, int64_t sequence, int64_t i) {
                 for (int64_t h = 0; h < chunk.dim(1); ++h) {
                   *at_mutable<float>(log_sums, sequence * heads + first_head + h, i) =
                       *at<float>(chunk, in_chunk, h);
                 }
               });
}

void ContextRowCopies::log_sums_in(const Tensor& log_sums, const ContextRows& rows,
                                   int64_t first_head, const ChunkRows& to) const {
  const int64_t heads = grid_.shape.heads;
  for_each_row(rows, grid_.shape.batch, to,
               [&](const Tensor& chunk, int64_t in_chunk, int64_t, int64_t sequence, int64_t i) {
                 for (int64_t h = 0; h < chunk.dim(1); ++h) {
                   *at_mutable<float>(chunk, in_chunk, h) =
                       *at<float>(log_sums, sequence * heads + first_head + h, i);
                 }
               });
}

void ContextRowCopies::deltas(const Tensor& dout, const Tensor& out, const ContextRows& rows,
                              int64_t first_head, const ChunkRows& to) const {
  const int64_t dim = grid_.shape.head_dim;
  cpu::with_type(dout.dtype(), "context_attention", [&]<typename T>(T) {
    for_each_row(rows, grid_.shape.batch, to,
                 [&](const Tensor& chunk, int64_t in_chunk, int64_t row, int64_t, int64_t) {
                   for (int64_t h = 0; h < chunk.dim(1); ++h) {
                     const int64_t column = (first_head + h) * dim;
                     *at_mutable<float>(chunk, in_chunk, h) =
                         cpu::dot(at<T>(dout, row, column), at<T>(out, row, column), dim);
                   }
                 });
  });
}

void copy(const ChunkRows& from, const ChunkRows& to) {
  cpu::with_type(to.head.dtype(), "context_attention", [&]<typename T>(T) {
    for_both(from, to, [](const Tensor& source, const Tensor& target) {
      cpu::parallel_ranges(source.elements(), 1 << 14, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          target.as<T>()[i] = cpu::from_f32<T>(source.as<float>()[i]);
        }
      });
    });
  });
}

void fill(const ChunkRows& rows, float value) {
  for (const Tensor& chunk : {rows.head, rows.tail}) {
    std::fill_n(chunk.as<float>(), chunk.elements(), value);
  }
}

void add(const ChunkRows& from, const ChunkRows& to) {
  for_both(from, to, [](const Tensor& partial, const Tensor& sum) {
    const float* const source = partial.as<float>();
    float* const target = sum.as<float>();
    cpu::parallel_ranges(partial.elements(), 1 << 14, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) target[i] += source[i];
    });
  });
}

void merge(const ChunkRows& partial, const ChunkRows& partial_log_sums, const ChunkRows& out,
           const ChunkRows& log_sums) {
  const auto merge_chunk = [](const Tensor& p, const Tensor& p_sums, const Tensor& o,
                              const Tensor& o_sums) {
    if (p.dim(0) == 0) return;
    const int64_t heads = p_sums.dim(1), dim = p.dim(1) / heads;
    cpu::parallel_ranges(p.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t h = 0; h < heads; ++h) {
          cpu::merge_partial(at_mutable<float>(o, row, h * dim), *at_mutable<float>(o_sums, row, h),
                             at<float>(p, row, h * dim), *at<float>(p_sums, row, h), dim);
        }
      }
    });
  };
  merge_chunk(partial.head, partial_log_sums.head, out.head, log_sums.head);
  merge_chunk(partial.tail, partial_log_sums.tail, out.tail, log_sums.tail);
}

}  // namespace tandem
