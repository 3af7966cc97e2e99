// Local parts of a cross-entropy over logits sharded by vocabulary; the caller reduces over ranks
// between the steps. Softmax over the whole vocabulary of row i is e^(logit - maxima[i]) / sums[i].
// maxima, sums and picked are f32, targets i32; the vectors have one element a row. logits are f32,
// on a GPU also bf16.
#pragma once

#include <cstdint>

#include "core/exec.h"

namespace tandem {

/// maxima[i] = max of row i; the lowest float if there are no columns.
void cross_entropy_max(const Exec& exec, const Tensor& logits, const Tensor& maxima);
/// sums[i] = sum of e^(logit - maxima[i]); picked[i] = logit of targets[i] minus maxima[i] if it is
/// one of the columns [begin, begin + logits.dim(1)), else 0.
void cross_entropy_sum(const Exec& exec, const Tensor& logits, const Tensor& targets, int64_t begin,
                       const Tensor& maxima, const Tensor& sums, const Tensor& picked);
/// Both, with their bits, for a rank that has the whole vocabulary.
void cross_entropy_max_and_sum(const Exec& exec, const Tensor& logits, const Tensor& targets,
                               const Tensor& maxima, const Tensor& sums, const Tensor& picked);
/// total += sum over rows whose target is >= 0 of log(sums) - picked, in a fixed order, on a CPU
/// that of the rows. total: a double, as u8 [8].
void cross_entropy_loss(const Exec& exec, const Tensor& targets, const Tensor& sums,
                        const Tensor& picked, const Tensor& total);
/// dlogits = scale x (softmax - one-hot(target)); rows with target < 0 are 0. f32 or bf16; may be
/// the logits, if of their dtype.
void cross_entropy_backward(const Exec& exec, const Tensor& logits, const Tensor& targets,
                            int64_t begin, const Tensor& maxima, const Tensor& sums, float scale,
                            const Tensor& dlogits);
/// Whether the logits are of the dtype of their gradient, which may take their place: on a GPU.
bool dlogits_replace_logits(const Exec& exec);

}  // namespace tandem
