// DLPack's memory layout (dmlc/dlpack 1.0, a stable ABI), as returned by `__dlpack__`.
#pragma once

#include <cstdint>

namespace tandem::python {

struct DLDevice {
  int32_t type, index;
};
constexpr int32_t kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3;

struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
constexpr uint8_t kDlInt = 0, kDlUInt = 1, kDlFloat = 2, kDlBFloat = 4;

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t dims;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {  // in a capsule named "dltensor"
  DLTensor tensor;
  void* manager;
  void (*free)(DLManagedTensor*);
};

struct DLManagedTensorVersioned {  // in a capsule named "dltensor_versioned"
  uint32_t major, minor;
  void* manager;
  void (*free)(DLManagedTensorVersioned*);
  uint64_t flags;
  DLTensor tensor;
};
constexpr uint64_t kDlReadOnly = 1, kDlCopied = 2;

}  // namespace tandem::python
