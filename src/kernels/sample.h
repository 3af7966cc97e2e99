// Choice of the next token of several sequences from their logits: a pure function of a row's
// logits and options.
#pragma once

#include <cstdint>
#include <span>

#include "core/exec.h"

namespace tandem {

/// Options of one row; engine/infer/sampling/sampling.h describes them.
struct SampleOptions {
  double temperature = 1, top_p = 1;
  int64_t top_k = 0;
  double uniform = 0;  ///< random number in [0, 1)
};

/// Choice of a row.
struct Sampled {
  int32_t token;   ///< -1: a logit is not finite
  float log_prob;  ///< natural logarithm of its probability at temperature 1, without top-k and -p
};

/// On a CPU: samples from one row, which must be finite. The choice is by `changed` logits instead,
/// if there are any; those may be -infinity, for tokens that are not chosen.
Sampled sample_row(std::span<const float> logits, const SampleOptions& options,
                   std::span<const float> changed = {});

/// On a CPU: logarithm of the sum of the logits' exponentials, NaN if one is not finite. A token's
/// log-probability is its logit less this.
double log_sum_exp(std::span<const float> logits);

/// Bytes of scratch per row that a GPU needs; 0 on a CPU.
int64_t sample_scratch(const Exec& exec, int64_t vocab);

/// On a GPU: samples from each row; CPU ranks have engine/infer/sampling/shard_sampler.h. logits:
/// f32 [rows, vocab], rows may be strided. options: u8 [rows, sizeof(SampleOptions)]; sampled: u8
/// [rows, sizeof(Sampled)]; scratch: u8 [rows, sample_scratch(exec, vocab)]. Weights of tokens are
/// multiples of a share of the likeliest token's, 2^-40 on a GPU and up to 2^-42 on a CPU, so that
/// their sums do not depend on an order: a GPU's choice is the CPU's unless the random number is
/// within about 1e-9 of a boundary.
void sample_rows(const Exec& exec, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled);

/// Replaces each negative token, -1 - i, by the one in row i of `sampled`, or by 0 if that is none
/// either. tokens: i32 [n]; sampled: as sample_rows has it, with rows for all i.
void feed_tokens(const Exec& exec, const Tensor& sampled, const Tensor& tokens);

}  // namespace tandem
