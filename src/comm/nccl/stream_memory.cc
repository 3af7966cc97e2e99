#include "comm/nccl/stream_memory.h"

#include <cuda.h>

#include "core/cuda/check.h"

namespace tandem::gpu {
namespace {

// The driver is found at run time: programs of this build also start where there is none.
template <typename Function>
Function find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) {
    throw Unsupported(std::string(name) + ": this driver has none");
  }
  return reinterpret_cast<Function>(function);
}

void check_code(CUresult code, const char* name) {
  if (code != CUDA_SUCCESS) {
    throw DeviceError(std::string(name) + ": error " + std::to_string(int(code)));
  }
}

}  // namespace

void write_value(cudaStream_t stream, uint64_t* word, uint64_t value) {
  static const auto write = find<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64");
  check_code(
      write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue64");
}

void take_value(cudaStream_t stream, unsigned* word, unsigned value) {
  static const auto enqueue = find<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  CUstreamBatchMemOpParams steps[2] = {};
  auto& wait = steps[0].waitValue;
  wait.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  wait.address = reinterpret_cast<CUdeviceptr>(word);
  wait.value = value;
  wait.flags = CU_STREAM_WAIT_VALUE_GEQ;
  auto& clear = steps[1].writeValue;
  clear.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  clear.address = wait.address;
  clear.value = 0;
  clear.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  check_code(enqueue(stream, 2, steps, 0), "cuStreamBatchMemOp");
}

}  // namespace tandem::gpu
