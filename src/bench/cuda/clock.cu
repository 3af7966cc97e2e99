#include "bench/cuda/clock.h"
#include "comm/device/device_signal.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

__global__ void timestamp_kernel(uint64_t* at) {
  *at = nanoseconds();
}

__global__ void timer_step_kernel(uint64_t* step) {
  constexpr int kReadings = 20000;  // about a millisecond: many steps of any timer
  uint64_t minimum = 0, last = nanoseconds();
  for (int i = 0; i < kReadings; ++i) {
    const uint64_t now = nanoseconds(), since = now - last;
    if (since > 0 && (minimum == 0 || since < minimum)) minimum = since;
    last = now;
  }
  *step = minimum;
}

}  // namespace

void launch_timestamp(uint64_t* at, cudaStream_t stream) {
  timestamp_kernel<<<1, 1, 0, stream>>>(at);
  check_launch("stamp_kernel");
}

void launch_timer_step(uint64_t* step, cudaStream_t stream) {
  timer_step_kernel<<<1, 1, 0, stream>>>(step);
  check_launch("timer_step_kernel");
}

}  // namespace tandem::gpu
