#include "kernels/embedding.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

void embedding_forward(const Exec& exec, const Tensor& tokens, const Tensor& table, int64_t begin,
                       const Tensor& out) {
  if (exec.on_gpu()) return gpu::embedding_forward(exec.stream, tokens, table, begin, out);
  cpu::embedding_forward(tokens, table, begin, out);
}

void embedding_backward(const Exec& exec, const Tensor& tokens, const Tensor& dout, int64_t begin,
                        const Tensor& dtable, const Tensor& order) {
  if (exec.on_gpu())
    return gpu::embedding_backward(exec.stream, tokens, dout, begin, dtable, order);
  cpu::embedding_backward(tokens, dout, begin, dtable);
}

int64_t embedding_order(const Exec& exec, int64_t rows) {
  return exec.on_gpu() ? rows : 0;
}

}  // namespace tandem
