// Biases of adjacent columns of the column-parallel GEMM: of q, k and v, or of gate and up.
#include "engine/model/program/op_row.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

/// Columns of the operands, which are adjacent.
Tensor biased_columns(const Op& op, const BranchLayout& branch, const Tensor& hidden) {
  const Shard &first = branch.columns[size_t(op.in.front())],
              &last = branch.columns[size_t(op.in.back())];
  return columns(hidden, first.begin, last.begin + last.count - first.begin);
}

struct ColumnBias {
  static void forward(const Op& op, Frame& f) {
    const Tensor biased = biased_columns(op, f.branch, f.at(kHidden));
    add_bias(f.exec(), f.vector(op, biased.dim(1)), biased);
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const Tensor gradient = biased_columns(op, f.branch, f.gradient(kHidden));
    const int64_t offset = f.branch.offset(op);
    const bool adds = f.run.adds_gradient(offset);
    column_sums(f.exec(), gradient, f.run.gradient(offset, gradient.dim(1)), adds);
  }

  static void declare_backward(const Op& op, Declaration& d) {
    d.add_between(d.gradients_of(op, placement::column_sums(d.gradients[kHidden], "")));
  }
};

}  // namespace

const OpRow kColumnBias = make_row<ColumnBias>("column_bias");

}  // namespace tandem::program
