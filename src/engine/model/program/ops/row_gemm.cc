// Row-parallel GEMM: sums over the ranks, of which each has its rows, added to the residual stream.
#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct RowGemm {
  static constexpr bool is_gemm = true;

  static void declare(const Op& op, Declaration& d) {
    PlacedTensor inner = d.inner.front();
    if (d.inner.size() > 1) inner = placement::fuse(d.inner, "");
    inner.name = d.name("inner");
    d.values[kInner] = d.add(inner);
    d.sum = d.add(placement::gemm_rs(inner, d.matrix(op, "out"), d.name("sum")));
    for (const Op& each : d.program.ops) {
      if (each.row->finish) each.row->declare(each, d);
    }
    d.x = d.add(
        placement::add(d.x, d.sum, d.name(d.program.find(kExperts) ? "shared_output" : "output")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    d.gradients[kInner] = d.add(
        placement::ag_gemm(d.d_sum, placement::transposed(d.matrix(op, "out")), d.name("d_inner")));
    const PlacedTensor rows =
        placement::all_gather(d.d_sum, kTp, placement::kRows, d.d_sum.name + ", all rows");
    d.add(d.gradients_of(op, placement::gemm(placement::transposed(rows), d.values[kInner], "")));
  }
};

}  // namespace

const OpRow kRowGemm = make_row<RowGemm>("row_gemm");

}  // namespace tandem::program
