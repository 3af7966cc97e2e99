// SwiGLU or GEGLU of an MLP's two projections.
#include "kernels/swiglu.h"

#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct Swiglu {
  static bool is_gelu(const ModelConfig& c) { return c.mlp_activation != "silu"; }
  static void forward(const Op& op, Frame& f) {
    const auto run = is_gelu(f.view.config) ? geglu_forward : swiglu_forward;
    run(f.exec(), f.at(op.in[0]), f.at(op.in[1]), f.at(op.out[0]));
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const auto run = is_gelu(f.view.config) ? geglu_backward : swiglu_backward;
    run(f.exec(), f.at(op.in[0]), f.at(op.in[1]), f.gradient(op.out[0]), f.gradient(op.in[0]),
        f.gradient(op.in[1]));
  }

  static void declare(const Op&, Declaration& d) {
    d.inner.push_back(placement::elementwise("swiglu", {d.values[kHidden]}, d.name("swiglu")));
  }
  /// Next to attention, its backward pass declares the gradient of all columns.
  static void declare_backward(const Op&, Declaration& d) {
    if (d.program.find(kAttention)) return;
    d.gradients[kHidden] = d.add(placement::elementwise(
        "swiglu_backward", {d.values[kHidden], d.gradients[kInner]}, d.name("d_hidden")));
  }

  static const char* needs_cpu(const ModelConfig& c) {
    return is_gelu(c) ? "model.mlp_activation: another function than silu" : nullptr;
  }
  static std::string refusal(const BranchProgram& program, const Op& op, const ModelConfig&,
                             int64_t tp) {
    const char* const key = program.find(kExperts) ? "shared_ffn" : "ffn";
    return refuse_unless_multiple(key, program.columns(op.in.front()).count(), 8 * tp);
  }
};

}  // namespace

const OpRow kSwiglu = make_row<Swiglu>("swiglu");

}  // namespace tandem::program
