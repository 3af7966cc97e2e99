// Products and sums are never fused, as on the CPU.
#include "kernels/cuda/optimizer/outer_step.h"

#include <cstdint>

#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"
#include "kernels/cuda/optimizer/optimizer_vectors.cuh"

namespace tandem::gpu {
namespace {

struct Subtract {
  const float *x, *y;
  float* difference;

  __device__ void operator()(int64_t i) const { difference[i] = __fsub_rn(x[i], y[i]); }
};

struct Divide {
  float* values;
  float divisor;

  __device__ void operator()(int64_t i) const { values[i] = __fdiv_rn(values[i], divisor); }
};

struct Scale {
  const float* values;
  float factor;
  float* scaled;

  __device__ void operator()(int64_t i) const { scaled[i] = __fmul_rn(factor, values[i]); }
};

struct TakeSigns {
  float* values;

  __device__ void operator()(int64_t i) const {
    const float value = values[i];
    if (!isnan(value)) values[i] = float(value > 0) - float(value < 0);
  }
};

struct StepAlong {
  const float* direction;
  float rate;
  float* weights;

  __device__ void operator()(int64_t i) const {
    weights[i] = __fsub_rn(weights[i], __fmul_rn(rate, direction[i]));
  }
};

struct Step {
  OuterConstants step;
  const float* mean;
  float *weights, *anchor, *velocity;

  __device__ void operator()(int64_t i) const {
    float outer = mean[i];
    if (velocity) {
      const float v = __fadd_rn(__fmul_rn(step.momentum, velocity[i]), mean[i]);
      velocity[i] = v;
      outer = step.nesterov ? __fadd_rn(mean[i], __fmul_rn(step.momentum, v)) : v;
    }
    const float moved = __fsub_rn(anchor[i], __fmul_rn(step.lr, outer));
    anchor[i] = moved;
    weights[i] = step.mix == 0 ? moved
                               : __fadd_rn(__fmul_rn(step.mix, weights[i]),
                                           __fmul_rn(__fsub_rn(1, step.mix), moved));
  }
};

template <typename Body>
__global__ void __launch_bounds__(kThreads) element_kernel(const Body body, int64_t count) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) body(i);
}

template <typename Body>
void launch(cudaStream_t stream, const char* name, const Body& body, int64_t count) {
  if (count == 0) return;
  element_kernel<<<blocks_for(count), kThreads, 0, stream>>>(body, count);
  check_launch(name);
}

}  // namespace

void subtract(cudaStream_t stream, const Tensor& x, const Tensor& y, const Tensor& difference) {
  launch(stream, "subtract",
         Subtract{x.as<const float>(), y.as<const float>(), difference.as<float>()}, x.elements());
}

void divide(cudaStream_t stream, const Tensor& values, float divisor) {
  launch(stream, "divide", Divide{values.as<float>(), divisor}, values.elements());
}

void scale(cudaStream_t stream, const Tensor& values, float factor, const Tensor& scaled) {
  launch(stream, "scale", Scale{values.as<const float>(), factor, scaled.as<float>()},
         values.elements());
}

void outer_step(cudaStream_t stream, const OuterConstants& step, const Tensor& mean,
                const OuterState& state) {
  launch(stream, "outer_step",
         Step{step, mean.as<const float>(), state.weights.as<float>(), state.anchor.as<float>(),
              state.velocity.data() ? state.velocity.as<float>() : nullptr},
         mean.elements());
}

void take_signs(cudaStream_t stream, const Tensor& values) {
  launch(stream, "take_signs", TakeSigns{values.as<float>()}, values.elements());
}

void step_along(cudaStream_t stream, const Tensor& direction, float rate, const Tensor& weights) {
  launch(stream, "step_along", StepAlong{direction.as<const float>(), rate, weights.as<float>()},
         weights.elements());
}

}  // namespace tandem::gpu
