#include "kernels/optimizer.h"

#include <cmath>

#include "core/cpu/scalar.h"
#include "kernels/cuda/optimizer/optimizer.h"
#include "kernels/elementwise.h"

namespace tandem {
namespace {

/// Updates both moments of an element.
inline void update_moments(const AdamConstants& s, float gradient, float& m, float& v) {
  const float g = gradient * s.gradient_scale;
  m = s.beta1 * m + (1 - s.beta1) * g;
  v = s.beta2 * v + (1 - s.beta2) * g * g;
}

}  // namespace

void adamw(const Exec& exec, const AdamConstants& step, bool decay, const AdamState& state,
           const Tensor& gradient, const Tensor& working) {
  const float shrink = decay ? 1 - step.lr * step.weight_decay : 1;
  if (exec.on_gpu()) return gpu::adamw(exec.stream, step, shrink, state, gradient, working);
  const AdamConstants s = step;
  const int64_t count = state.w.elements();
  float* const wp = state.w.as<float>();
  float* const mp = state.m.as<float>();
  float* const vp = state.v.as<float>();
  cpu::with_type(gradient.dtype(), "adamw", [&]<typename T>(T) {
    const T* const gp = gradient.as<T>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
    for (int64_t i = 0; i < count; ++i) {
      update_moments(s, cpu::to_f32(gp[i]), mp[i], vp[i]);
      wp[i] = shrink * wp[i] -
              s.lr * (mp[i] * s.correction1) / (std::sqrt(vp[i] * s.correction2) + s.eps);
    }
  });
  if (working.data()) cast(exec, state.w, working);
}

void lamb_direction(const Exec& exec, const AdamConstants& step, bool decay, const AdamState& state,
                    const Tensor& gradient) {
  const AdamConstants s = step;
  const float weight_decay = decay ? s.weight_decay : 0;
  if (exec.on_gpu()) return gpu::lamb_direction(exec.stream, s, weight_decay, state, gradient);
  const int64_t count = state.w.elements();
  const float* const wp = state.w.as<const float>();
  float* const gp = gradient.as<float>();
  float* const mp = state.m.as<float>();
  float* const vp = state.v.as<float>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) {
    update_moments(s, gp[i], mp[i], vp[i]);
    gp[i] =
        (mp[i] * s.correction1) / (std::sqrt(vp[i] * s.correction2) + s.eps) + weight_decay * wp[i];
  }
}

void lamb_update(const Exec& exec, float rate, const Tensor& w, const Tensor& direction,
                 const Tensor& working) {
  if (exec.on_gpu()) return gpu::lamb_update(exec.stream, rate, w, direction, working);
  const int64_t count = w.elements();
  float* const wp = w.as<float>();
  const float* const up = direction.as<const float>();
#pragma omp parallel for simd schedule(static) if (count > 65536)
  for (int64_t i = 0; i < count; ++i) wp[i] -= rate * up[i];
  if (working.data()) cast(exec, w, working);
}

size_t square_sum_bytes(const Exec& exec, int sums) {
  return exec.on_gpu() ? gpu::square_sum_bytes(sums) : size_t(sums) * sizeof(double);
}

void add_squares(const Exec& exec, const Tensor& values, const Memory& sums, int index) {
  if (exec.on_gpu()) return gpu::add_squares(exec.stream, values, sums, index);
  reinterpret_cast<double*>(sums.data())[index] += sum_of_squares(values);
}

double sum_of_squares(const Tensor& tensor) {
  constexpr int64_t kLanes = 16;
  double sum = 0, lanes[kLanes] = {};
  cpu::with_type(tensor.dtype(), "sum_of_squares", [&]<typename T>(T) {
    const T* const values = tensor.as<T>();
    const int64_t count = tensor.elements();
    const auto square = [values](int64_t i) {
      const double value = cpu::to_f32(values[i]);
      return value * value;
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += square(i + lane);
    }
    for (; i < count; ++i) sum += square(i);
  });
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace tandem
