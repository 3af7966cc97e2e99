// Factor of the row-parallel GEMM's sum (Granite): residual_multiplier / embedding_multiplier, as
// the residual stream is kept divided by the latter.
#include "engine/model/program/op_row.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct SumScale {
  static constexpr const char* cpu_only =
      "model.residual_multiplier, model.embedding_multiplier: factors of branches";

  static void finish(const Op&, const LayerView& view, const BranchLayout&, const Values&,
                     const Tensor& sum) {
    scale_rows(view.exec, sum, view.config.branch_scale());
  }
  static void backward(const Op&, BackwardFrame& f) {
    scale_rows(f.exec(), f.d_sum, f.view.config.branch_scale());
  }

  static void declare(const Op&, Declaration& d) {
    d.sum = d.add(placement::by_rows("scale", {d.sum}, {}, d.name("scaled_sum")));
  }
  static void declare_backward(const Op&, Declaration& d) {
    d.d_sum = d.add(placement::by_rows("scale", {d.d_sum}, {}, d.name("d_sum")));
  }
};

}  // namespace

const OpRow kSumScale = make_row<SumScale>("sum_scale");

}  // namespace tandem::program
