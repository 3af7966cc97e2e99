// Local parts of a cross-entropy over logits sharded by vocabulary; the caller reduces over ranks
// between the steps. Softmax over the whole vocabulary of row i is e^(logit - maxima[i]) / sums[i].
#pragma once

#include <cstdint>
#include <span>

#include "tandem/tensor.h"

namespace tandem {

/// maxima[i] = max of row i (f32); the lowest float if there are no columns.
void cross_entropy_max(const Tensor& logits, std::span<float> maxima);
/// sums[i] = sum of e^(logit - maxima[i]); picked[i] = logit of targets[i] minus maxima[i] if it is
/// one of the columns [begin, begin + logits.dim(1)), else 0.
void cross_entropy_sum(const Tensor& logits, std::span<const int32_t> targets, int64_t begin,
                       std::span<const float> maxima, std::span<float> sums,
                       std::span<float> picked);
/// Sum over rows whose target is >= 0 of log(sums) - picked, in row order.
double cross_entropy_loss(std::span<const int32_t> targets, std::span<const float> sums,
                          std::span<const float> picked);
/// dlogits = scale x (softmax - one-hot(target)); rows with target < 0 are 0. f32 or bf16.
void cross_entropy_backward(const Tensor& logits, std::span<const int32_t> targets, int64_t begin,
                            std::span<const float> maxima, std::span<const float> sums, float scale,
                            const Tensor& dlogits);

}  // namespace tandem
