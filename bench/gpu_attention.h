// Part of gpu_kernels_bench: attention of Llama-3.1-8B's layer.
#pragma once

#include "bench/gpu_candidates.h"
#include "core/exec.h"

namespace tandem {

/// Prints one JSON object per line: operator, form (cudnn; cudnn_unordered: its backward pass that
/// sums in any order; simple), median time in microseconds with the rotary embedding, and TFLOP/s,
/// of causal scores half, of the backward pass 2.5 times the forward pass. Throws if the forms'
/// results differ.
void bench_attention(const Exec& exec, const gpu::Flush& flush);

}  // namespace tandem
