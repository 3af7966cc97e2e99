// Rows of a rank between its caller's tensors, in the order of positions, and the chunks of a
// message. Rotation is by position in the whole sequence, or in its document, and happens here
// only: keys and queries are sent rotated.
#pragma once

#include "overlap/attention/shape.h"

namespace tandem {

class ContextRowCopies {
 public:
  /// `rope`: nullptr: nothing is rotated. Must outlive this.
  ContextRowCopies(const ContextGrid& grid, const RopeTable* rope) : grid_(grid), rope_(rope) {}

  /// `to` <- the rows of `from`: their columns [first_column, first_column + to's columns).
  void copy_in(const Tensor& from, const schedule::ContextRows& rows, int64_t first_column,
               const cpu::ChunkRows& to) const;
  /// copy_in of rotated heads.
  void rotate_in(const Tensor& from, const schedule::ContextRows& rows, int64_t first_column,
                 const AttentionMask& mask, const cpu::ChunkRows& to) const;
  /// Columns of `to` from first_column on <- `from`, in the dtype of `to`.
  void copy_out(const cpu::ChunkRows& from, const schedule::ContextRows& rows, int64_t first_column,
                const Tensor& to) const;
  /// Gradients of rotated heads, f32 <- those before the rotation.
  void rotate_back(const cpu::ChunkRows& gradients, const schedule::ContextRows& rows,
                   const AttentionMask& mask) const;
  /// rotate_back, then copy_out.
  void rotate_out(const cpu::ChunkRows& from, const schedule::ContextRows& rows,
                  int64_t first_column, const AttentionMask& mask, const Tensor& to) const;
  /// Heads [first_head, ..) of log_sums [batch * heads, rows] <- `from` [.., heads], and back.
  void log_sums_out(const cpu::ChunkRows& from, const schedule::ContextRows& rows,
                    int64_t first_head, const Tensor& log_sums) const;
  void log_sums_in(const Tensor& log_sums, const schedule::ContextRows& rows, int64_t first_head,
                   const cpu::ChunkRows& to) const;
  /// `to` [.., heads] <- dot(dout, out) of heads [first_head, ..).
  void deltas(const Tensor& dout, const Tensor& out, const schedule::ContextRows& rows,
              int64_t first_head, const cpu::ChunkRows& to) const;

 private:
  ContextGrid grid_;
  const RopeTable* rope_;
};

/// to <- from, f32, in the dtype of `to`; of equal shapes.
void copy(const cpu::ChunkRows& from, const cpu::ChunkRows& to);
/// Elements of both chunks <- value; f32.
void fill(const cpu::ChunkRows& rows, float value);
/// to += from, f32, of equal shapes.
void add(const cpu::ChunkRows& from, const cpu::ChunkRows& to);
/// Merges the partial results of queries, f32: see cpu::merge_partial. [.., heads x head_dim] and
/// [.., heads].
void merge(const cpu::ChunkRows& partial, const cpu::ChunkRows& partial_log_sums,
           const cpu::ChunkRows& out, const cpu::ChunkRows& log_sums);

}  // namespace tandem
