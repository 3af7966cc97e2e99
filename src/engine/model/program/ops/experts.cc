// Experts of the rows that the router sends them, added to the residual stream.
#include <algorithm>

#include "engine/model/program/cost.h"
#include "engine/model/program/op_row.h"
#include "overlap/moe/quantization.h"

namespace tandem::program {
namespace {

/// Rows that CPU ranks allocate over those that arrive: memory that grows leaves room.
constexpr double kRoom = 1.25;
/// Rows that pad an expert's on GPUs.
constexpr double kPadding = 127;

struct Experts {
  static std::string parameter(const Op& op, const Declaration& d, size_t matrix, int64_t expert) {
    return d.layer() + d.program.weights[op.weights[matrix]].name_of(expert);
  }
  /// Matrices of all experts in one.
  static PlacedTensor fuse(const Op& op, const Declaration& d, std::initializer_list<size_t> all,
                           const char* tensor) {
    placement::Operands matrices;
    for (int64_t e = 0; e < op.copies; ++e) {
      for (const size_t matrix : all) matrices.push_back(d.at(parameter(op, d, matrix, e)));
    }
    return placement::fuse_experts(matrices, d.name(tensor));
  }
  static void declare(const Op& op, Declaration& d) {
    const PlacedTensor& routed = d.add(
        placement::experts("experts", {d.values[kXNorm], d.others.at("routing")},
                           fuse(op, d, {0, 2}, "in"), fuse(op, d, {1}, "out"), d.name("routed")));
    d.x = d.add(placement::add(d.x, routed, d.name("output")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    const placement::Operands rows{d.dx, d.values[kXNorm], d.others.at("routing")};
    const PlacedTensor in = fuse(op, d, {0, 2}, "in"), out = fuse(op, d, {1}, "out");
    const auto add_gradients = [&](const PlacedTensor& weights, std::initializer_list<size_t> all) {
      const PlacedTensor gradients =
          placement::experts_gradient(rows, weights, weights.name + " gradient");
      for (int64_t e = 0; e < op.copies; ++e) {
        for (const size_t matrix : all) {
          const std::string name = parameter(op, d, matrix, e);
          d.add(placement::one_expert(gradients, d.at(name).over(Axis::ep).rank(),
                                      gradient_name(name)));
        }
      }
    };
    add_gradients(in, {0, 2});
    add_gradients(out, {1});
    if (op.weights.size() > 3) add_gradients(fuse(op, d, {3, 4}, "biases"), {3, 4});
    for (const char* tensor : {"d_rows", "d_routing"}) {
      d.others[tensor] = placement::experts("experts_backward", rows, in, out, d.name(tensor));
    }
  }

  /// Counts rows spread evenly over the experts; on GPUs as many as could arrive.
  static double bytes(const Sizes& s) {
    const double hidden = double(s.model.hidden), ffn = double(s.model.ffn_per_expert()) / s.tp,
                 top_k = double(s.model.top_k);
    const double local = double(s.model.experts) / s.ep;
    if (!s.on_gpus) {
      const double row = s.is_fp8 ? double(packed_row_bytes(s.model.hidden)) : hidden * s.element;
      switch (s.moe_save) {
        case MoeSave::sorted:
          return kRoom * s.tokens * top_k * (row + 3 * ffn * s.element);
        case MoeSave::rows:
          return kRoom * s.tokens * (std::min(top_k, s.ep) * row + top_k * 2 * ffn * s.element);
        case MoeSave::recompute:
          return kRoom * s.tokens / s.tp * hidden * s.element;
      }
    }
    const double rows = s.ep * s.tokens * std::min(top_k, local) + kPadding * local;
    return rows * (hidden + 2 * ffn) * s.element;
  }
  static const char* needs_cpu(const ModelConfig& c) {
    return c.swiglu_limit > 0 ? "model.swiglu_limit: clamped experts" : nullptr;
  }
  static std::string refusal(const BranchProgram&, const Op&, const ModelConfig& c, int64_t tp) {
    return refuse_unless_multiple(c.expert_ffn > 0 ? "expert_ffn" : "ffn", c.ffn_per_expert(),
                                  8 * tp);
  }
};

}  // namespace

const OpRow kExperts = make_row<Experts>("experts");

}  // namespace tandem::program
