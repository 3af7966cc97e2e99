// Bias of the row-parallel GEMM, added to the complete sum: once, whatever the number of ranks.
// Result: the gradient's terms of a rank's rows.
#include "engine/model/program/op_row.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct SumBias {
  static void finish(const Op& op, const LayerView& view, const BranchLayout& branch, const Values&,
                     const Tensor& sum) {
    add_bias(view.exec, view.weights.vector(branch.offset(op), sum.dim(1)), sum);
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const Tensor& term = f.at(op.out[0]);
    const Tensor flat(term.data(), DType::f32, {term.elements()}, term.device());
    column_sums(f.exec(), f.d_sum, flat, false);
    f.run.sum_gradient(term, f.branch.offset(op));
  }

  static void declare(const Op& op, Declaration& d) {
    d.sum = d.add(placement::by_rows("add_bias", {d.sum}, {d.at(d.parameter(op))},
                                     d.name("sum, with " + d.program.weights[op.weights[0]].name)));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    const std::string weight = d.parameter(op);
    d.add(d.summed(
        placement::sum_of_rows("column_sums", {d.d_sum}, gradient_name(weight) + ", local rows"),
        weight));
  }
};

}  // namespace

const OpRow kSumBias = make_row<SumBias>("sum_bias");

}  // namespace tandem::program
