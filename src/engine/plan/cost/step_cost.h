// Step time of a rank from its work: each term's factor says how far the work is from the data
// sheet. Factors are physical: 1.45 for GEMMs means 69 % of the peak, .6 for TP means that 40 % of
// its exchanges are hidden.
//
//   layer = gemm, gemm_bytes, memory, attention, launch, tp, cp, ep, each times its factor
//   stage = layers · layer (+ head on the last); the slowest stage sets the pace of a pipeline
//   step  = (microbatches · stage · (1 + bubble) + exposed gradient sums + optimizer + fixed)
//           · (1 + jitter · log2(hosts)): a step waits for the slowest of all ranks
//   exposed sums = (window^4 + sums^4)^(1/4) − window, a smooth max(0, sums − window)
#pragma once

#include <array>
#include <string_view>

#include "engine/plan/cost/step_work.h"

namespace tandem::plan {

enum class Term {
  gemm,
  gemm_bytes,
  memory,
  attention,
  launch,
  tp,
  cp,
  ep,
  pp,
  bubble,
  dp,
  dp_messages,
  window,
  optimizer,
  head,
  imbalance,
  fixed,
  jitter,
  software
};
constexpr size_t kTerms = 19;

/// Prior of a factor, log-normal: its mean, the deviation of the logarithm, and further deviations
/// among GPUs, GPUs and precisions, groups and software versions.
struct TermPrior {
  std::string_view name;
  double mean, deviation;
  double by_gpu = 0, by_precision = 0, by_group = 0, by_software = 0;
};
/// Indexed by Term.
const std::array<TermPrior, kTerms>& term_priors();

using Factors = std::array<double, kTerms>;
Factors prior_means();

/// A step in seconds, and what it is made of.
struct StepTime {
  double total = 0;
  double compute = 0, exposed_tp = 0, exposed_cp = 0, exposed_ep = 0, exposed_pp = 0,
         exposed_dp = 0;
  double exposed_sync = 0;  ///< of learners' exchanges (learner_exchange.h)
  double imbalance = 0, bubble = 0, optimizer = 0, fixed = 0, jitter = 0;
};
StepTime step_time(const StepWork& work, const Factors& factors);

/// Seconds of a layer's kernels and of the head's for one microbatch, without exchanges.
double layer_seconds(const LayerWork& layer, const Factors& factors);
double head_seconds(const StepWork& work, const Factors& factors);
/// Seconds of a step whatever its work.
double fixed_seconds(const Factors& factors);

}  // namespace tandem::plan
