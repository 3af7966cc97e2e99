// Gate of the shared expert (Qwen2-MoE): its rows times the sigmoid of a column, which is a row of
// the column-parallel GEMM's matrix on every rank. The operand's other columns are 0, and so are
// their gradients: no pass writes them.
#include "engine/model/program/op_row.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct GateRows {
  static void forward(const Op& op, Frame& f) {
    gate_rows(f.exec(), columns(f.at(op.in[0]), 0, 1), f.at(op.out[0]));
  }
  static void backward(const Op& op, BackwardFrame& f) {
    gate_rows_backward(f.exec(), columns(f.at(op.in[0]), 0, 1), f.at(op.out[0]),
                       f.gradient(op.out[0]), columns(f.gradient(op.in[0]), 0, 1));
  }

  /// Every rank sees only its columns of the shared expert.
  static void declare_backward(const Op& op, Declaration& d) {
    const PlacedTensor products = placement::elementwise(
        "gate_rows_backward", {d.values[kInner], d.gradients[kInner]}, d.name("d_gate, terms"));
    const PlacedTensor d_gate =
        placement::gemm(products, d.constant("ones, each column", placement::kRows),
                        d.name("d_gate, local columns"));
    const PlacedTensor rows = placement::all_gather(d.values[kXNorm], kTp, placement::kRows, "");
    const std::string weight = d.parameter(op);
    d.add_between(d.summed(placement::gemm(placement::transposed(d_gate), rows,
                                           gradient_name(weight) + ", local columns"),
                           weight));
  }
};

}  // namespace

const OpRow kGateRows = make_row<GateRows>("shared_expert_gate");

}  // namespace tandem::program
