// Host-side setup of CUTLASS shared by all fused kernels: operands, device, and the parameters that
// launches reuse.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/gemm.h>
#include <cutlass/util/packed_stride.hpp>

#include <cstdint>
#include <string>

#include "core/cuda/check.h"
#include "core/cuda/share.h"
#include "tandem/error.h"

namespace tandem::gpu::fused {

/// x: [m, k], weight: [n, k], on the current device.
template <class Gemm>
void set_operands(typename Gemm::Arguments& arguments, int64_t m, int64_t n, int64_t k,
                  const void* x, const void* weight) {
  using Kernel = typename Gemm::GemmKernel;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {int(m), int(n), int(k), 1};
  auto& mainloop = arguments.mainloop;
  mainloop.ptr_A = static_cast<const typename Kernel::ElementA*>(x);
  mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {int(m), int(k), 1});
  mainloop.ptr_B = static_cast<const typename Kernel::ElementB*>(weight);
  mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {int(n), int(k), 1});
  auto& device = arguments.hw_info;
  check(cudaGetDevice(&device.device_id), "current device");
  device.sm_count = this_share()->sms();
}

/// `kernel`: name in errors, as in "ag_gemm: the fused kernel".
template <class Gemm>
typename Gemm::Params set_up(typename Gemm::Arguments const& arguments, const char* kernel) {
  if (Gemm::can_implement(arguments) != cutlass::Status::kSuccess) {
    throw Unsupported(std::string(kernel) + " does not take this shape");
  }
  Gemm gemm;
  if (gemm.initialize(arguments) != cutlass::Status::kSuccess) {
    throw DeviceError(std::string(kernel) + " could not be set up");
  }
  return gemm.params();
}

}  // namespace tandem::gpu::fused
