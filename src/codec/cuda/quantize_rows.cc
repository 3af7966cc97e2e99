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

}  // namespace tandem
