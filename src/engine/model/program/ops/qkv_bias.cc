// Biases of q, k and v (Qwen2).
#include "engine/model/program/op_row.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

/// Columns of q, k and v, which are adjacent.
Tensor qkv_columns(const Op& op, const BranchLayout& branch, const Tensor& hidden) {
  const Shard &q = branch.columns[size_t(op.in.front())], &v = branch.columns[size_t(op.in.back())];
  return columns(hidden, q.begin, v.begin + v.count - q.begin);
}

struct QkvBias {
  static void forward(const Op& op, Frame& f) {
    const Tensor qkv = qkv_columns(op, f.branch, f.at(kHidden));
    add_bias(f.exec(), f.vector(op, qkv.dim(1)), qkv);
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const Tensor dqkv = qkv_columns(op, f.branch, f.gradient(kHidden));
    const int64_t offset = f.branch.offset(op);
    const bool adds = f.run.adds_gradient(offset);
    column_sums(f.exec(), dqkv, f.run.gradient(offset, dqkv.dim(1)), adds);
  }

  static void declare_backward(const Op& op, Declaration& d) {
    d.add_between(d.gradients_of(op, placement::column_sums(d.gradients[kHidden], "")));
  }
};

}  // namespace

const OpRow kQkvBias = make_row<QkvBias>("qkv_bias");

}  // namespace tandem::program
