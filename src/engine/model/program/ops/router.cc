// Router: scores of the experts for each row, and its choice of them.
#include "engine/model/program/op_row.h"

namespace tandem::program {
namespace {

/// Ranks that share a step's tokens.
constexpr Axes kTokens{Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp};

struct Router {
  static void declare(const Op& op, Declaration& d) {
    const PlacedTensor& logits = d.add(placement::gemm(
        d.values[kXNorm], placement::transposed(d.at(d.parameter(op))), d.name("logits")));
    const placement::Operands bias = declare_bias(op, d);
    const PlacedTensor &scores = d.add(placement::by_rows("route", {logits}, {}, d.name("scores"))),
                       &routing =
                           d.add(placement::by_rows("route", {logits}, bias, d.name("routing")));
    const PlacedTensor& load =
        d.add(placement::sum_of_rows("router_load", {scores, routing}, d.name("load, local rows")));
    const PlacedTensor& all = d.add(placement::all_reduce(load, kTokens, d.name("load")));
    d.others = {{"scores", scores}, {"routing", routing}, {"load", all}};
    if (bias.empty()) return;
    d.add(placement::elementwise("adjust_router_bias", {bias.front(), all},
                                 bias.front().name + ", adjusted"));
  }
  /// Adjusted by the load and not by its gradient, which is 0.
  static placement::Operands declare_bias(const Op& op, Declaration& d) {
    if (op.weights.size() == 1) return {};
    const PlacedTensor& bias = d.at(d.parameter(op, 1));
    PlacedTensor zero{gradient_name(bias.name), "clear", bias.placements};
    for (const Axis axis : {Axis::cp, Axis::ep, Axis::expert_dp})
      zero.over(axis) = Placement::partial();
    d.add(std::move(zero));
    return {bias};
  }

  static void declare_backward(const Op& op, Declaration& d) {
    const PlacedTensor &scores = d.others.at("scores"), &routing = d.others.at("routing");
    const PlacedTensor& d_logits =
        d.add(placement::by_rows("route_backward", {scores, routing, d.others.at("d_routing")},
                                 declare_balance(d), d.name("d_logits")));
    d.others["d_logits"] = d_logits;
    const std::string weight = d.parameter(op);
    d.add(d.summed(placement::gemm(placement::transposed(d_logits), d.values[kXNorm],
                                   gradient_name(weight) + ", local rows"),
                   weight));
    d.d_x_norm.push_back(d.add(placement::add(
        d.others.at("d_rows"), placement::gemm(d_logits, d.at(weight), d.name("d_logits x router")),
        d.name(d.program.find(kRowGemm) ? "d_routed_x_norm" : "d_x_norm"))));
  }
  /// Gradient of the auxiliary loss, which is a function of the load of all tokens.
  static placement::Operands declare_balance(Declaration& d) {
    if (d.config.aux_loss_coeff == 0) return {};
    const PlacedTensor& load = d.others.at("load");
    d.add(placement::elementwise("aux_loss", {load}, d.name("aux_loss")));
    return {d.add(placement::elementwise("balance_gradient", {load}, d.name("d_scores")))};
  }

  static std::string refusal(const BranchProgram&, const Op&, const ModelConfig& c, int64_t) {
    const std::string unaligned = refuse_unless_multiple("experts", c.experts, 4);
    return unaligned.empty() ? refuse_above("experts", c.experts, 1024) : unaligned;
  }
};

}  // namespace

const OpRow kRouter = make_row<Router>("router");

}  // namespace tandem::program
