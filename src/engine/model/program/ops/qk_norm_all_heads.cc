// Norms of all heads of q, and of all heads of k, at once, before their rotation (OLMo2): ranks
// add up the sums of squares of theirs. Results: q and k as they were and the inverse RMS of both,
// [2, tokens], for the backward pass, and memory of its sums.
#include "engine/model/program/op_row.h"
#include "kernels/divided_norm.h"
#include "kernels/elementwise.h"

namespace tandem::program {
namespace {

/// Ranks that share a head of k count it equally often: columns here, times the ranks.
DividedNorm norm_of(const Frame& f, const Tensor& rows) {
  return {rows.dim(1) * (f.view.config.heads / f.view.layout.heads), f.view.config.norm_eps};
}

Tensor row(const Tensor& sums, size_t i) {
  const Tensor one = sums.rows(int64_t(i), 1);
  return Tensor(one.data(), DType::f32, {one.elements()}, one.device());
}

struct QkNormAllHeads {
  static constexpr const char* cpu_only = "model.qk_norm_all_heads: norms of all heads at once";

  static NormWeight weight(const Op& op, const Frame& f, size_t i) {
    return f.view.norm(f.branch.offsets[op.weights[i]], f.at(op.in[i]).dim(1));
  }
  static void forward(const Op& op, Frame& f) {
    const Tensor& saved = f.at(op.out[2]);
    const bool is_saved = saved.dims() > 0;
    const Activation scratch(DType::f32, is_saved ? 0 : 2, f.at(op.in[0]).dim(0), f.exec().device);
    const Tensor& sums = is_saved ? saved : scratch;
    for (size_t i = 0; i < op.in.size(); ++i) {
      divided_norm_squares(f.exec(), f.at(op.in[i]), row(sums, i));
    }
    f.run.sum_over_ranks(sums);
    for (size_t i = 0; i < op.in.size(); ++i) {
      const Tensor& rows = f.at(op.in[i]);
      divided_norm_forward(f.exec(), weight(op, f, i), norm_of(f, rows), rows, row(sums, i),
                           f.at(op.out[i]));
    }
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const Tensor &inverse_rms = f.at(op.out[2]), &sums = f.at(op.out[3]);
    for (size_t i = 0; i < op.in.size(); ++i) {
      divided_norm_products(f.exec(), weight(op, f, i), f.at(op.out[i]), f.gradient(op.in[i]),
                            row(sums, i));
    }
    f.run.sum_over_ranks(sums);
    const int64_t offset = f.branch.offset(op), q = f.at(op.in[0]).dim(1),
                  count = q + f.at(op.in[1]).dim(1);
    const Tensor dweights = f.run.gradient(offset, count);
    if (!f.run.adds_gradient(offset)) clear(f.exec(), dweights);
    for (size_t i = 0; i < op.in.size(); ++i) {
      const Tensor& drows = f.gradient(op.in[i]);
      divided_norm_backward(f.exec(), weight(op, f, i), norm_of(f, drows), f.at(op.out[i]),
                            row(inverse_rms, i), row(sums, i), drows,
                            dweights.narrow(0, i == 0 ? 0 : q, drows.dim(1)));
    }
  }

  /// Sum over a rank's columns of a product of two tensors, a product with ones, then over ranks.
  static void declare_sum(Declaration& d, const placement::Operands& factors, const char* sum) {
    const PlacedTensor products =
        placement::elementwise("divided_norm", factors, d.name(std::string(sum) + ", terms"));
    const PlacedTensor local =
        placement::gemm(products, d.constant("ones, each column", placement::kRows),
                        d.name(std::string(sum) + ", local columns"));
    d.add(local);
    d.add(placement::all_reduce(local, kTp, d.name(sum)));
  }
  static void declare(const Op&, Declaration& d) {
    const PlacedTensor hidden = d.values[kHidden];
    declare_sum(d, {hidden}, "squares of q and k");
    d.values[kHidden] =
        d.add(placement::elementwise("divided_norm", {hidden}, d.name("normalized hidden")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    const placement::Operands factors{d.values[kHidden], d.gradients[kHidden]};
    declare_sum(d, factors, "products of q and k with their gradients");
    d.add_between(d.gradients_of(
        op,
        placement::column_sums(placement::elementwise("divided_norm_backward", factors, ""), "")));
  }
};

}  // namespace

const OpRow kQkNormAllHeads = make_row<QkNormAllHeads>("qk_norm_all_heads");

}  // namespace tandem::program
