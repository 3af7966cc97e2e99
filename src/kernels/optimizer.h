// Elementwise updates of the optimizers, and sums of squares, for gradient norms. All tensors are
// contiguous and f32, but for AdamW's gradient and the values of sums of squares, which may be
// bf16. The order of a sum depends only on its length.
#pragma once

#include "core/exec.h"

namespace tandem {

/// Constants of a step of AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2).
struct AdamConstants {
  float lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  float correction1 = 1, correction2 = 1;  ///< 1 / (1 - beta^step)
  float gradient_scale = 1;                ///< clipping
};

/// Weights and both moments.
struct AdamState {
  Tensor w, m, v;
};

/// Updates the state in place; applies weight decay only if `decay`. All of one size. `working`:
/// bf16 copy of the weights that is updated with them; without data if there is none.
void adamw(const Exec& exec, const AdamConstants& step, bool decay, const AdamState& state,
           const Tensor& gradient, const Tensor& working = {});

/// First phase of LAMB: updates both moments and replaces `gradient` by the direction
/// m^ / (sqrt(v^) + eps) + weight_decay * w, the last term only if `decay`. All of one size.
void lamb_direction(const Exec& exec, const AdamConstants& step, bool decay, const AdamState& state,
                    const Tensor& gradient);
/// Second phase: w -= rate * direction. `working`: as adamw's.
void lamb_update(const Exec& exec, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working = {});

/// Bytes of `sums` f64 sums, which come first, and of the device's scratch.
size_t square_sum_bytes(const Exec& exec, int sums);
/// sums[index] += sum of the squares of `values`. `sums`: square_sum_bytes on exec's device.
void add_squares(const Exec& exec, const Tensor& values, const Memory& sums, int index);
/// On the host.
double sum_of_squares(const Tensor& values);

}  // namespace tandem
