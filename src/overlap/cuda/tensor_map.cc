#include "overlap/cuda/tensor_map.h"

#include <string>

#include "core/cuda/check.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

CUtensorMapDataType map_type(DType dtype) {
  if (dtype == DType::bf16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::f16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  throw InvalidArgument("tensor map: dtype: expected bf16 or f16");
}

// The driver is found at run time: programs of this build also start where there is none.
auto find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &found),
        "cuTensorMapEncodeTiled");
  if (found != cudaDriverEntryPointSuccess) {
    throw Unsupported("cuTensorMapEncodeTiled: this driver has none");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

CUtensorMap map_matrix(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows) {
  static const auto encode = find_encode();
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t stride = cuuint64_t(columns) * size_of(dtype);
  const cuuint32_t box[] = {cuuint32_t(128 / size_of(dtype)), cuuint32_t(box_rows)};
  const cuuint32_t every[] = {1, 1};
  CUtensorMap map;
  const CUresult code =
      encode(&map, map_type(dtype), 2, const_cast<void*>(data), sizes, &stride, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS) {
    throw DeviceError("cuTensorMapEncodeTiled: error " + std::to_string(int(code)));
  }
  return map;
}

}  // namespace tandem::gpu
