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

auto tensor_map_encoder() {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  return encode;
}

/// A matrix or several; elements between their rows, and from one to the next; rows of a box.
struct Matrices {
  int64_t columns, rows, count;
  int64_t row_stride, matrix_stride;
  int box_rows, box_matrices = 1;
};

/// Tensor map with the first `dimensions` of: columns, rows, matrices.
CUtensorMap encoded(const void* data, DType dtype, unsigned dimensions, const Matrices& m) {
  const auto encode = tensor_map_encoder();
  const auto bytes = cuuint64_t(size_of(dtype));
  const cuuint64_t sizes[] = {cuuint64_t(m.columns), cuuint64_t(m.rows), cuuint64_t(m.count)};
  const cuuint64_t strides[] = {cuuint64_t(m.row_stride) * bytes,
                                cuuint64_t(m.matrix_stride) * bytes};
  const cuuint32_t box[] = {cuuint32_t(128 / bytes), cuuint32_t(m.box_rows),
                            cuuint32_t(m.box_matrices)};
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
  return encoded(data, dtype, 2, {columns, rows, 1, columns, rows * columns, box_rows});
}

CUtensorMap map_words(const void* data, int64_t rows, int64_t columns, int box_columns) {
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t strides[] = {cuuint64_t(columns) * sizeof(uint32_t)};
  const cuuint32_t box[] = {cuuint32_t(box_columns), 1}, every[] = {1, 1};
  CUtensorMap map;
  const CUresult code = tensor_map_encoder()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, const_cast<void*>(data), sizes, strides, box, every,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check_driver(code, "cuTensorMapEncodeTiled");
  return map;
}

CUtensorMap map_matrices(const void* data, DType dtype, int64_t count, int64_t rows,
                         int64_t columns, int box_rows) {
  return map_rows(data, dtype, count, rows, columns, columns, box_rows);
}

CUtensorMap map_rows(const void* data, DType dtype, int64_t count, int64_t rows, int64_t columns,
                     int64_t stride, int box_rows) {
  return encoded(data, dtype, 3, {columns, rows, count, stride, rows * stride, box_rows});
}

CUtensorMap map_heads(const void* data, DType dtype, int64_t rows, int64_t heads, int64_t head_dim,
                      int64_t stride, int box_rows, int box_heads) {
  return encoded(data, dtype, 3, {head_dim, heads, rows, head_dim, stride, box_heads, box_rows});
}

}  // namespace tandem::gpu
