// Biases of experts' results, added to the residual stream before these: the weighted sum of those
// of a row's experts, which every rank has all of. The experts' pass adds it.
#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

struct ExpertBias {
  static constexpr const char* cpu_only = "model.expert_bias: biases of experts";

  static void declare(const Op& op, Declaration& d) {
    d.x = d.add(placement::by_rows("add_expert_biases", {d.x, d.others.at("routing")},
                                   {d.at(d.parameter(op))}, d.name("biased")));
  }
  static void declare_backward(const Op& op, Declaration& d) {
    const std::string bias = d.parameter(op);
    const placement::Operands rows{d.dx, d.others.at("routing")};
    d.add(d.summed(placement::sum_of_rows("add_expert_biases_backward", rows,
                                          gradient_name(bias) + ", local rows"),
                   bias));
    const PlacedTensor term = placement::by_rows("add_expert_biases_backward", rows, {d.at(bias)},
                                                 d.name("d_routing, biases"));
    d.others["d_routing"] =
        placement::add(d.others.at("d_routing"), term, d.name("d_routing, all"));
  }
};

}  // namespace

const OpRow kExpertBias = make_row<ExpertBias>("expert_bias");

}  // namespace tandem::program
