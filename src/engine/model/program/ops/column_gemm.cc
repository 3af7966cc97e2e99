// Column-parallel GEMM: all-gather of the normalized rows, times the weights of their projections.
#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct ColumnGemm {
  static constexpr bool is_gemm = true;

  static void declare(const Op& op, Declaration& d) {
    d.values[kHidden] =
        d.add(placement::ag_gemm(d.values[kXNorm], d.matrix(op, "in"), d.name("hidden")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    d.add(d.gradients_of(op, placement::ag_wgrad(d.values[kXNorm], d.gradients[kHidden], "")));
    d.add(d.between);
    d.d_x_norm.push_back(d.add(placement::gemm_rs(
        d.gradients[kHidden], placement::transposed(d.matrix(op, "in")), d.name("d_x_norm"))));
  }
};

}  // namespace

const OpRow kColumnGemm = make_row<ColumnGemm>("column_gemm");

}  // namespace tandem::program
