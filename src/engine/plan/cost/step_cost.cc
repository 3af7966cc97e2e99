#include "engine/plan/cost/step_cost.h"

#include <algorithm>
#include <cmath>

namespace tandem::plan {
namespace {

constexpr double kFixedSeconds = 1e-2;

}  // namespace

const std::array<TermPrior, kTerms>& term_priors() {
  static constexpr std::array<TermPrior, kTerms> kPriors{{
      {"gemm", 1.45, .12, 0, .08},
      {"gemm_bytes", .5, .3},
      {"memory", .7, .5, .2, 0, .2},
      {"attention", 1.8, .3, 0, .15, .2},
      {"launch", .7, .7, 0, 0, .3},
      {"tp", .6, .5},
      {"cp", .5, .3},
      {"ep", 1, .5, 0, 0, .3, .3},
      {"pp", .1, .2},
      {"bubble", 1, .1},
      {"dp", 1.4, .3, .2, 0, .2, .15},
      {"dp_messages", .3, .3},
      {"window", .3, .5},
      {"optimizer", 1.5, .3},
      {"head", 1.45, .12},
      {"imbalance", 1, .1},
      {"fixed", 1, .5, 0, 0, .3},
      {"jitter", .01, .3, 0, 0, .3},
      {"software", 1, 0, 0, 0, 0, .05},
  }};
  return kPriors;
}

Factors prior_means() {
  Factors means;
  std::ranges::transform(term_priors(), means.begin(), &TermPrior::mean);
  return means;
}

double layer_seconds(const LayerWork& layer, const Factors& factors) {
  const auto factor = [&](Term term) { return factors[size_t(term)]; };
  return factor(Term::gemm) * layer.gemm + factor(Term::gemm_bytes) * layer.gemm_bytes +
         factor(Term::memory) * layer.memory + factor(Term::attention) * layer.attention +
         factor(Term::launch) * layer.launch;
}

double head_seconds(const StepWork& work, const Factors& factors) {
  return factors[size_t(Term::head)] * work.head_gemm +
         factors[size_t(Term::memory)] * work.head_bytes;
}

double fixed_seconds(const Factors& factors) {
  return factors[size_t(Term::fixed)] * kFixedSeconds;
}

StepTime step_time(const StepWork& work, const Factors& factors) {
  const auto factor = [&](Term term) { return factors[size_t(term)]; };
  const LayerWork& layer = work.layer;
  const double kernels = layer_seconds(layer, factors);
  const double tp = factor(Term::tp) * layer.tp, cp = factor(Term::cp) * layer.cp,
               ep = factor(Term::ep) * layer.ep;
  const double layer_time = kernels + tp + cp + ep;
  const double head = head_seconds(work, factors);
  const double stages = work.stages;
  const double mean = layer_time * work.mean_layers + head / stages;
  const double slowest =
      std::max(layer_time * work.stage_layers, layer_time * work.last_stage_layers + head);
  const double transfers = factor(Term::pp) * work.pp;
  const double m = work.microbatches;
  StepTime time;
  time.compute = m * (kernels * work.mean_layers + head / stages);
  time.exposed_tp = m * tp * work.mean_layers;
  time.exposed_cp = m * cp * work.mean_layers;
  time.exposed_ep = m * ep * work.mean_layers;
  time.exposed_pp = m * transfers;
  time.imbalance = m * factor(Term::imbalance) * (slowest - mean);
  const double steady = m * (mean + transfers) + time.imbalance;
  time.bubble = steady * factor(Term::bubble) * work.bubble;
  const double sums = factor(Term::dp) * work.dp + factor(Term::dp_messages) * work.dp_messages;
  const double window =
      work.fsdp ? steady : factor(Term::window) * steady / m * work.window_microbatches;
  time.exposed_dp = std::pow(std::pow(window, 4) + std::pow(sums, 4), .25) - window;
  time.optimizer = factor(Term::optimizer) * work.optimizer;
  time.fixed = fixed_seconds(factors);
  const double sum = steady + time.bubble + time.exposed_dp + time.optimizer + time.fixed;
  time.total = sum * (1 + factor(Term::jitter) * work.octaves) * factor(Term::software);
  time.jitter = time.total - sum;
  return time;
}

}  // namespace tandem::plan
