#include "kernels/divided_norm.h"

#include "kernels/cpu/kernels.h"
#include "tandem/error.h"

namespace tandem {
namespace {

void require_cpu(const Exec& exec) {
  if (exec.on_gpu()) throw Unsupported("divided_norm: expected CPU ranks");
}

}  // namespace

void divided_norm_squares(const Exec& exec, const Tensor& rows, const Tensor& sums) {
  require_cpu(exec);
  cpu::divided_norm_squares(rows, sums);
}

void divided_norm_forward(const Exec& exec, const NormWeight& weight, const DividedNorm& norm,
                          const Tensor& rows, const Tensor& sums, const Tensor& unnormalized) {
  require_cpu(exec);
  cpu::divided_norm_forward(weight, norm, rows, sums, unnormalized);
}

void divided_norm_products(const Exec& exec, const NormWeight& weight, const Tensor& unnormalized,
                           const Tensor& drows, const Tensor& sums) {
  require_cpu(exec);
  cpu::divided_norm_products(weight, unnormalized, drows, sums);
}

void divided_norm_backward(const Exec& exec, const NormWeight& weight, const DividedNorm& norm,
                           const Tensor& unnormalized, const Tensor& inverse_rms,
                           const Tensor& sums, const Tensor& drows, const Tensor& dweight) {
  require_cpu(exec);
  cpu::divided_norm_backward(weight, norm, unnormalized, inverse_rms, sums, drows, dweight);
}

}  // namespace tandem
