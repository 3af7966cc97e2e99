// Input of a branch without a norm before it (OLMo2): the residual stream, rounded.
#include "engine/model/program/op_row.h"
#include "kernels/elementwise.h"

namespace tandem::program {
namespace {

struct RoundStream {
  static void forward(const Op&, Frame& f) { cast(f.exec(), f.x, f.at(kXNorm)); }

  static void declare(const Op&, Declaration& d) {
    d.values[kXNorm] = d.add(placement::by_rows("cast", {d.x}, {}, d.name("x_norm")));
  }
  static void declare_backward(const Op&, Declaration& d) {
    for (const PlacedTensor& each : d.d_x_norm) {
      d.dx = placement::add(d.dx, each, d.name("d_input"));
    }
    d.add(d.dx);
  }
};

}  // namespace

const OpRow kRoundStream = make_row<RoundStream>("round_stream");

}  // namespace tandem::program
