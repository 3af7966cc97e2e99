#include "codec/quantize.h"

#include <fmt/format.h>

#include <limits>

#include "codec/cuda/quantize.h"
#include "comm/device/gpu_communicator.h"

namespace tandem {

void quantize_rows_on_gpu(Communicator& any, const Tensor& x, const Tensor& codes,
                          const Tensor& scales) {
  const gpu::GpuCommunicator& comm = gpu::as_gpu(any);
  for (const Tensor* tensor : {&x, &codes, &scales}) {
    const bool here = tensor->device() == Device{DeviceKind::cuda, comm.device()};
    if (here && reinterpret_cast<uintptr_t>(tensor->data()) % 16 == 0) continue;
    throw InvalidArgument(fmt::format("quantize_rows: {}: expected it 16-byte aligned on cuda {}",
                                      tensor->describe(), comm.device()));
  }
  if (x.dim(1) % 16 != 0) {
    throw InvalidArgument(
        fmt::format("quantize_rows: {} columns: expected a multiple of 16 on GPUs", x.dim(1)));
  }
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();  // max thread blocks of a grid
  if (x.dim(0) > kMaxRows) {
    throw InvalidArgument(
        fmt::format("quantize_rows: {} rows: expected at most {} on GPUs", x.dim(0), kMaxRows));
  }
  comm.check_device();
  gpu::launch_quantize_rows(x, codes, scales, comm.stream());
}

void quantize_rows_on_gpu(const Exec& exec, const Tensor& x, const Tensor& codes,
                          const Tensor& scales) {
  gpu::launch_quantize_rows(x, codes, scales, exec.stream);
}

void quantize_columns_on_gpu(const Exec& exec, const Tensor& x, const Tensor& codes,
                             const Tensor& scales) {
  if (x.dtype() != DType::bf16 || x.dim(0) % 16 != 0 || x.dim(1) % 16 != 0) {
    throw InvalidArgument(fmt::format(
        "quantize_columns: x is {}: expected bf16, both extents multiples of 16", x.describe()));
  }
  gpu::launch_quantize_columns(x, codes, scales, exec.stream);
}

}  // namespace tandem
