// Norm before a branch.
#include "kernels/norm.h"

#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct RmsNorm {
  static void forward(const Op&, Frame& f) {
    rms_norm_forward(f.exec(), f.x, f.view.norm(f.branch), f.view.config.stream_eps(), f.at(kXNorm),
                     f.at(kInverseRms));
  }

  static void declare(const Op& op, Declaration& d) {
    d.values[kXNorm] =
        d.add(placement::by_rows("rms_norm", {d.x}, {d.at(d.parameter(op))}, d.name("x_norm")));
  }
  /// Every rank sees only its rows of the residual stream.
  static void declare_backward(const Op& op, Declaration& d) {
    const std::string weight = d.parameter(op);
    placement::Operands sum;
    for (const PlacedTensor& each : d.d_x_norm) {
      const PlacedTensor term = placement::sum_of_rows("rms_norm_backward", {d.input, each},
                                                       gradient_name(weight) + ", local rows");
      sum = {sum.empty() ? term : placement::add(sum.front(), term, term.name)};
    }
    d.add(d.summed(sum.front(), weight));
    for (const PlacedTensor& each : d.d_x_norm) {
      const PlacedTensor term = placement::by_rows(
          "rms_norm_backward", {d.input, each}, {d.at(weight)}, each.name + ", through the norm");
      d.dx = placement::add(d.dx, term, d.name("d_input"));
    }
    d.add(d.dx);
  }

  static std::string refusal(const BranchProgram&, const Op&, const ModelConfig& c, int64_t) {
    return refuse_unless_multiple("hidden", c.hidden, 8);
  }
};

}  // namespace

const OpRow kRmsNorm = make_row<RmsNorm>("rms_norm");

}  // namespace tandem::program
