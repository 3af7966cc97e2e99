#include "comm/nccl/stream_memory.h"

#include <cuda.h>

#include "core/cuda/check.h"

namespace tandem::gpu {
namespace {

// The driver is found at run time: programs of this build also start where there is none.
using WriteValue = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned int);

WriteValue find_write_value() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuStreamWriteValue64", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuStreamWriteValue64");
  if (found != cudaDriverEntryPointSuccess) {
    throw Unsupported("cuStreamWriteValue64: this driver has none");
  }
  return reinterpret_cast<WriteValue>(function);
}

}  // namespace

void write_value(cudaStream_t stream, uint64_t* word, uint64_t value) {
  static const WriteValue write = find_write_value();
  const CUresult code =
      write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  if (code != CUDA_SUCCESS) {
    throw DeviceError("cuStreamWriteValue64: error " + std::to_string(int(code)));
  }
}

}  // namespace tandem::gpu
