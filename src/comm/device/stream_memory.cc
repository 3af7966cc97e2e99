#include "comm/device/stream_memory.h"

#include "core/cuda/driver.h"

namespace tandem::gpu {

void write_value(cudaStream_t stream, uint64_t* word, uint64_t value) {
  static const auto write =
      driver_function<decltype(&cuStreamWriteValue64)>("cuStreamWriteValue64");
  check_driver(
      write(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
      "cuStreamWriteValue64");
}

void wait_value_and_reset(cudaStream_t stream, unsigned* word, unsigned value) {
  static const auto enqueue = driver_function<decltype(&cuStreamBatchMemOp)>("cuStreamBatchMemOp");
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
  check_driver(enqueue(stream, 2, steps, 0), "cuStreamBatchMemOp");
}

}  // namespace tandem::gpu
