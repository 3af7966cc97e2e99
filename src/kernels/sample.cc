#include "kernels/sample.h"

#include <algorithm>

#include "kernels/cuda/kernels.h"

namespace tandem {

int64_t sample_scratch(const Exec& exec, int64_t vocab) {
  return exec.on_gpu() ? gpu::sample_scratch(vocab) : 0;
}

void sample_rows(const Exec& exec, const Tensor& logits, const Tensor& options,
                 const Tensor& scratch, const Tensor& sampled) {
  gpu::sample_rows(exec.stream, logits, options, scratch, sampled);
}

void feed_tokens(const Exec& exec, const Tensor& sampled, const Tensor& tokens) {
  if (exec.on_gpu()) return gpu::feed_tokens(exec.stream, sampled, tokens);
  const auto* const rows = reinterpret_cast<const Sampled*>(sampled.data());
  for (int32_t& token : std::span(tokens.as<int32_t>(), size_t(tokens.elements()))) {
    if (token < 0) token = std::max(0, rows[-1 - token].token);
  }
}

}  // namespace tandem
