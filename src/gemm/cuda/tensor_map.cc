#include "gemm/cuda/tensor_map.h"

#include "core/cuda/driver.h"

namespace tandem::gpu {
namespace {

CUtensorMapDataType map_type(DType dtype) {
  if (dtype == DType::bf16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::f16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (dtype == DType::e4m3) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  throw InvalidArgument("tensor map: dtype: expected bf16, f16 or e4m3");
}

/// Tensor map of the first `dimensions` of: columns, rows, matrices.
CUtensorMap encoded(const void* data, DType dtype, unsigned dimensions, int64_t count, int64_t rows,
                    int64_t columns, int64_t stride, int box_rows) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const cuuint64_t row_bytes = cuuint64_t(stride) * size_of(dtype);
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(count)};
  const cuuint64_t strides[] = {row_bytes, row_bytes * cuuint64_t(rows)};
  const cuuint32_t box[] = {cuuint32_t(128 / size_of(dtype)), cuuint32_t(box_rows), 1};
  const cuuint32_t every[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult code =
      encode(&map, map_type(dtype), dimensions, const_cast<void*>(data), sizes, strides, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_driver(code, "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

CUtensorMap map_matrix(const void* data, DType dtype, int64_t rows, int64_t columns, int box_rows) {
  return encoded(data, dtype, 2, 1, rows, columns, columns, box_rows);
}

CUtensorMap map_matrices(const void* data, DType dtype, int64_t count, int64_t rows,
                         int64_t columns, int box_rows) {
  return encoded(data, dtype, 3, count, rows, columns, columns, box_rows);
}

CUtensorMap map_rows(const void* data, DType dtype, int64_t count, int64_t rows, int64_t columns,
                     int64_t stride, int box_rows) {
  return encoded(data, dtype, 3, count, rows, columns, stride, box_rows);
}

}  // namespace tandem::gpu
