// Norm of the row-parallel GEMM's complete sum, before it is added (OLMo2). Results: the sum as it
// was, for the backward pass, and the gradient's terms of a rank's rows.
#include "engine/model/program/op_row.h"
#include "kernels/elementwise.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct SumNorm {
  static constexpr const char* cpu_only = "model.norm_position: norms after branches";

  static void finish(const Op& op, const LayerView& view, const BranchLayout& branch,
                     const Values& values, const Tensor& sum) {
    rms_norm_heads(view.exec, view.norm(branch.offset(op), sum.dim(1)), view.config.norm_eps, sum,
                   values[size_t(op.out[0])]);
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const Tensor& term = f.at(op.out[1]);
    const Tensor flat(term.data(), DType::f32, {term.elements()}, term.device());
    clear(f.exec(), term);
    rms_norm_heads_backward(f.exec(), f.at(op.out[0]),
                            f.view.norm(f.branch.offset(op), flat.elements()),
                            f.view.config.norm_eps, f.d_sum, flat);
    f.run.sum_gradient(term, f.branch.offset(op));
  }

  static void declare(const Op& op, Declaration& d) {
    d.others["unnormalized sum"] = d.sum;
    d.sum = d.add(
        placement::by_rows("rms_norm", {d.sum}, {d.at(d.parameter(op))}, d.name("normalized_sum")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    const std::string weight = d.parameter(op);
    const placement::Operands operands{d.others.at("unnormalized sum"), d.d_sum};
    d.add(d.summed(placement::sum_of_rows("rms_norm_backward", operands,
                                          gradient_name(weight) + ", local rows"),
                   weight));
    d.d_sum = d.add(placement::by_rows("rms_norm_backward", operands, {d.at(weight)},
                                       d.name("d_unnormalized_sum")));
  }
};

}  // namespace

const OpRow kSumNorm = make_row<SumNorm>("sum_norm");

}  // namespace tandem::program
