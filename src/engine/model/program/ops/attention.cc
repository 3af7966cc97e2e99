// Attention of a rank's heads, rotary embedding included. Weight, if any: the heads' sinks.
#include <algorithm>

#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct AttentionOp {
  static void declare(const Op&, Declaration& d) {
    const placement::Operands qkv(3, d.values[kHidden]);
    d.inner.push_back(placement::attention("attention", qkv, d.name("attention")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    d.gradients[kHidden] = d.add(placement::attention(
        "attention_backward", {d.values[kHidden], d.values[kInner], d.gradients[kInner]},
        d.name("d_hidden")));
    if (op.weights.empty()) return;
    const PlacedTensor by_head = placement::attention(
        "sinks_backward", {d.values[kInner], d.gradients[kInner]}, d.name("d_sinks"));
    d.add_between(d.gradients_of(op, placement::column_sums(by_head, "")));
  }

  static double keys(const BranchProgram& program, const Op& op, int64_t seq) {
    const auto w = double(op.window > 0 ? std::min(op.window, seq) : seq);
    return double(program.columns(op.in.front()).count()) * (2 * w - w * w / double(seq));
  }
  static const char* needs_cpu(const ModelConfig& c) {
    return c.attention_sinks ? "model.attention_sinks: sinks of heads" : nullptr;
  }
  static std::string refusal(const BranchProgram&, const Op&, const ModelConfig& c, int64_t) {
    const std::string unaligned = refuse_unless_multiple("head_dim", c.head_dim, 8);
    return unaligned.empty() ? refuse_above("head_dim", c.head_dim, 128) : unaligned;
  }
};

}  // namespace

const OpRow kAttention = make_row<AttentionOp>("attention");

}  // namespace tandem::program
