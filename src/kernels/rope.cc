#include "kernels/rope.h"

#include <cmath>

namespace tandem {

RopeTable::RopeTable(const Exec& exec, int64_t max_seq, int64_t head_dim, double theta)
    : half_(head_dim / 2),
      memory_(size_t(2 * max_seq * half_) * sizeof(float), exec.device),
      cos_(memory_.view(DType::f32, {max_seq, half_})),
      sin_(memory_.view(DType::f32, {max_seq, half_}, cos_.bytes())) {
  const Memory staging(exec.on_gpu() ? memory_.bytes() : 0);
  auto* const cosines = reinterpret_cast<float*>((exec.on_gpu() ? staging : memory_).data());
  float* const sines = cosines + max_seq * half_;
  for (int64_t i = 0; i < half_; ++i) {
    const double frequency = std::pow(theta, -2.0 * double(i) / double(head_dim));
    for (int64_t position = 0; position < max_seq; ++position) {
      cosines[position * half_ + i] = float(std::cos(double(position) * frequency));
      sines[position * half_ + i] = float(std::sin(double(position) * frequency));
    }
  }
  if (!exec.on_gpu()) return;
  const std::initializer_list<int64_t> all{2 * max_seq * half_};
  copy(exec, staging.view(DType::f32, all), memory_.view(DType::f32, all));
}

}  // namespace tandem
