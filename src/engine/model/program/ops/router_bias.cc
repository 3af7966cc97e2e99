// Bias of the router's logits, which the router adds (engine/model/router.h). Stands before it: its
// gradient is a sum of the logits'.
#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct RouterBias {
  static constexpr const char* cpu_only = "model.router_logit_bias: biases of routers";

  static void declare_backward(const Op& op, Declaration& d) {
    const std::string bias = d.parameter(op);
    d.add(d.summed(placement::sum_of_rows("column_sums", {d.others.at("d_logits")},
                                          gradient_name(bias) + ", local rows"),
                   bias));
  }
};

}  // namespace

const OpRow kRouterBias = make_row<RouterBias>("router_bias");

}  // namespace tandem::program
