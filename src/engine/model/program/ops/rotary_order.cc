// Order of the features of q's and k's heads for the attention's rotation, which pairs feature i
// with i + head_dim / 2: partial rotation (Phi-3) and adjacent pairs (Ernie 4.5). Products of q and
// k do not depend on an order that both have.
#include "engine/model/program/op_row.h"
#include "engine/model/rotary.h"
#include "kernels/row_ops.h"

namespace tandem::program {
namespace {

struct RotaryOrder {
  static constexpr const char* cpu_only =
      "model.rotary_dim, model.rope_interleaved: another order of heads";

  static void forward(const Op& op, Frame& f) {
    const std::vector<int32_t> order = rotary_order(f.view.config);
    for (const ValueId id : op.in) permute_heads(f.exec(), f.at(id), order);
  }
  static void backward(const Op& op, BackwardFrame& f) {
    const std::vector<int32_t> order = inverse_order(rotary_order(f.view.config));
    for (const ValueId id : op.in) permute_heads(f.exec(), f.gradient(id), order);
  }
};

}  // namespace

const OpRow kRotaryOrder = make_row<RotaryOrder>("rotary_order");

}  // namespace tandem::program
