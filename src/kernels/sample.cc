#include "kernels/sample.h"

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/kernels.h"

namespace tandem {

int64_t sample_scratch(const Exec& exec, int64_t vocab) {
  return exec.on_gpu() ? gpu::sample_scratch(vocab) : 0;
}

void sample_rows(const Exec& exec, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled) {
  if (exec.on_gpu()) return gpu::sample_rows(exec.stream, logits, options, scratch, sampled);
  for (int64_t row = 0; row < logits.dim(0); ++row) {
    const std::span<const float> of_row(logits.as<float>() + row * logits.stride(0),
                                        size_t(logits.dim(1)));
    reinterpret_cast<Sampled*>(sampled.data())[row] =
        sample_row(of_row, reinterpret_cast<const SampleOptions*>(options.data())[row]);
  }
}

}  // namespace tandem
