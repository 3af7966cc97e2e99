// Router of a Mixture-of-Experts layer: scores and top-k choice of experts, its backward pass, and
// the experts' load. All sums have a fixed order, or are exact in any.
#pragma once

#include "core/exec.h"

namespace tandem {

struct RouterOptions {
  int top_k = 1;
  bool sigmoid = false;   ///< scores are sigmoid(logits), else softmax over the experts
  bool normalize = true;  ///< the chosen scores are divided by their sum
  float scale = 1;        ///< factor of the weights
};

/// logits: f32 [rows, experts] -> scores [rows, experts], experts i32 and weights f32 [rows,
/// top_k]. Picks the top_k largest of score + bias (the bias affects the choice, not the weight;
/// f32 [experts], without data: none), the lower expert first on a tie. A row with a logit that is
/// not finite gets scores of 0 and NaN as weights. A row whose token is negative is padding and
/// gets scores and weights of 0, and -1 as experts. tokens: i32 [rows], without data: no padding.
/// GPUs: at most 1024 experts.
void route_forward(const Exec& exec, const Tensor& logits, const Tensor& bias,
                   const RouterOptions& options, const Tensor& scores, const Tensor& experts,
                   const Tensor& weights, const Tensor& tokens = {});

/// dlogits (overwritten): gradient through the weights, given `dweights`, plus that of the sum over
/// experts of balance[e] x p[e] for every row, with p the scores divided by their sum; zeros for
/// padding. `balance`: f32 [experts], without data: none.
void route_backward(const Exec& exec, const Tensor& scores, const Tensor& experts,
                    const Tensor& dweights, const Tensor& balance, const RouterOptions& options,
                    const Tensor& dlogits);

/// Bytes of a load of `experts`: for each the number of rows that chose it, then for each the sum
/// of its probabilities, all doubles. A load is a u8 tensor, several are its rows.
constexpr int64_t router_load_bytes(int64_t experts) {
  return 2 * experts * int64_t(sizeof(double));
}

/// load += that of some rows, to which padding adds nothing. scores: f32 [rows, experts]; chosen:
/// i32 [rows, top_k]. Probabilities are rounded to multiples of 2^-28: their sums are exact, up to
/// 2^25 rows.
void add_router_load(const Exec& exec, const Tensor& scores, const Tensor& chosen,
                     const Tensor& load);
/// to += from, of any number of loads.
void add_loads(const Exec& exec, const Tensor& from, const Tensor& to);

/// Auxiliary loss of a layer (arXiv 2101.03961, equation 4): coefficient x experts x sum over e of
/// f[e] x P[e]; f is the fraction of all choices, P the mean probability. It is 1 x coefficient if
/// both are even.
struct AuxLoss {
  double coefficient = 0;
  int64_t experts = 1, top_k = 1;
};
/// balance: f32 [experts], the loss's derivative with respect to one row's probabilities.
void balance_gradient(const Exec& exec, const AuxLoss& loss, const Tensor& load,
                      const Tensor& balance);
/// total += the losses of the layers whose loads are the rows of `loads`. total: a double, as u8
/// [8].
void add_aux_losses(const Exec& exec, const AuxLoss& loss, const Tensor& loads,
                    const Tensor& total);

/// Moves every expert's bias by `rate`: up if its load is below the mean, down if above. bias: f32
/// [experts].
void adjust_router_bias(const Exec& exec, const Tensor& load, float rate, const Tensor& bias);

}  // namespace tandem
