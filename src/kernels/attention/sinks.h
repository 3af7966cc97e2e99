// Sinks: a logit for each head in the denominator of its softmax, without a key or a value
// (GPT-OSS; arXiv 2309.17453, 3.3). They are added to a result of attention without them, of all
// keys, by its log-sums; the backward pass of attention then needs no change.
#pragma once

#include "core/exec.h"

namespace tandem {

/// Replaces out, [batch x seq, heads x head_dim], f32 or bf16, and log_sums, f32 [batch x heads,
/// seq], both of attention without sinks, by those with `sinks`, f32 [heads]. On CPUs.
void add_sinks(const Exec& exec, const Tensor& sinks, const Tensor& out, const Tensor& log_sums);

/// Gradient of the sinks, f32 [heads]: written to `dsinks`, or added to it. out and log_sums: as
/// add_sinks left them; dout: gradient of out. On CPUs.
void sinks_backward(const Exec& exec, const Tensor& sinks, const Tensor& out,
                    const Tensor& log_sums, const Tensor& dout, const Tensor& dsinks,
                    bool accumulate);

}  // namespace tandem
