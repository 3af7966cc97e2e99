#include "overlap/gather/cuda/wgrad_gemm.h"

namespace tandem::gpu {

OperandExtents wgrad_extents(const OpDesc& s, int64_t x_rows) {
  return {{s.dtype, x_rows, s.k},
          {s.dtype, s.m, s.n},
          {DType::f32, s.weight_kn ? s.k : s.n, s.weight_kn ? s.n : s.k}};
}

void check_wgrad_operands(const GpuCommunicator& comm, const OpDesc& shape, int64_t x_rows,
                          const Tensor& x, const Tensor& dy, const Tensor& dw) {
  const OperandExtents expected = wgrad_extents(shape, x_rows);
  const auto check = [&](const char* operand, const Tensor& tensor, const Extent& e) {
    check_matrix(comm, "ag_wgrad", operand, tensor, e.dtype, e.rows, e.columns);
  };
  check("x", x, expected.x);
  check("dy", dy, expected.weight);
  check("dw", dw, expected.out);
}

}  // namespace tandem::gpu
