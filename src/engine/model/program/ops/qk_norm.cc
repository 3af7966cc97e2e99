// Norms of the heads of q and k, before their rotation (Qwen3). Results: q and k as they were, for
// the backward pass, and its partial sums and sums.
#include "engine/model/program/op_row.h"
#include "kernels/elementwise.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct QkNorm {
  static NormWeight weight(const Op& op, const Frame& f, size_t i) {
    return f.view.norm(f.branch.offsets[op.weights[i]], f.view.config.head_dim);
  }
  static void forward(const Op& op, Frame& f) {
    for (size_t i = 0; i < op.in.size(); ++i) {
      rms_norm_heads(f.exec(), weight(op, f, i), f.view.config.norm_eps, f.at(op.in[i]),
                     f.at(op.out[i]));
    }
  }
  /// Each rank has its heads.
  static void backward(const Op& op, BackwardFrame& f) {
    const int64_t head_dim = f.view.config.head_dim;
    const Tensor &scratch = f.at(op.out[2]), &sums = f.at(op.out[3]);
    const Tensor partial_sums(scratch.data(), DType::f32, {kHeadPartialSums, head_dim},
                              scratch.device());
    clear(f.exec(), sums);
    for (size_t i = 0; i < op.in.size(); ++i) {
      const int64_t begin = int64_t(i) * head_dim;
      const Tensor dweight(sums.as<float>() + begin, DType::f32, {head_dim}, sums.device());
      rms_norm_heads_backward(f.exec(), f.at(op.out[i]), weight(op, f, i), f.view.config.norm_eps,
                              f.gradient(op.in[i]), dweight, partial_sums);
    }
    f.run.sum_gradient(sums, f.branch.offset(op));
  }

  /// The sum over a rank's heads is a product with ones.
  static void declare_backward(const Op& op, Declaration& d) {
    const PlacedTensor by_head =
        placement::attention("rms_norm_heads_backward", {d.values[kHidden], d.gradients[kHidden]},
                             d.name("d_head_norms"));
    const PlacedTensor ones = d.constant("ones, each head", placement::kColumns);
    placement::Operands all;
    for (size_t i = 0; i < op.weights.size(); ++i) {
      const std::string weight = d.parameter(op, i);
      const PlacedTensor term = placement::gemm(ones, placement::column_sums(by_head, ""),
                                                gradient_name(weight) + ", local heads");
      for (const PlacedTensor& each : d.summed(term, weight)) all.push_back(each);
    }
    d.add_between(all);
  }
};

}  // namespace

const OpRow kQkNorm = make_row<QkNorm>("qk_norm");

}  // namespace tandem::program
