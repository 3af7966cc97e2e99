#include "gemm/cpu/bf16_gemm.h"

#include <oneapi/dnnl/dnnl.h>

namespace tandem::cpu {
namespace {

/// f32 copy of a bf16 matrix, contiguous in the same direction.
class Widened {
 public:
  explicit Widened(const Tensor& t) : memory_(size_t(t.elements()) * sizeof(float)) {
    const bool by_rows = t.stride(1) == 1 || t.dim(1) == 1;
    const int64_t rows = t.dim(0), columns = t.dim(1);
    view_ = by_rows ? memory_.view(DType::f32, {rows, columns})
                    : memory_.view(DType::f32, {columns, rows}).transposed();
    const int64_t num_outer = by_rows ? rows : columns, length = by_rows ? columns : rows;
    const int64_t outer_stride = t.stride(by_rows ? 0 : 1), step = t.stride(by_rows ? 1 : 0);
    auto* to = reinterpret_cast<float*>(memory_.data());
    for (int64_t outer = 0; outer < num_outer; ++outer) {
      const BFloat16* from = t.as<BFloat16>() + outer * outer_stride;
      for (int64_t i = 0; i < length; ++i) *to++ = from[i * step].to_float();
    }
  }
  const Tensor& view() const { return view_; }

 private:
  Memory memory_;
  Tensor view_;
};

void narrow(const Tensor& from, const Tensor& to) {
  for (int64_t i = 0; i < to.dim(0); ++i) {
    for (int64_t j = 0; j < to.dim(1); ++j) {
      to.as<BFloat16>()[i * to.stride(0) + j * to.stride(1)] =
          BFloat16::from_float(from.as<float>()[i * from.stride(0) + j * from.stride(1)]);
    }
  }
}

}  // namespace

bool has_bf16_products() {
  static const bool native = (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) ==
                             dnnl_cpu_isa_avx512_core_bf16;
  return native;
}

void widened_gemm(const Tensor& a, const Tensor& b, const Tensor& out, const GemmOptions& options,
                  F32Product multiply) {
  const Widened wide_a(a), wide_b(b);
  if (out.dtype() == DType::f32) return multiply(wide_a.view(), wide_b.view(), out, options);
  const Widened wide_out(out);
  const Tensor row = options.bias ? Tensor(options.bias->data(), DType::bf16, {1, out.dim(1)})
                                  : Tensor(nullptr, DType::bf16, {0, 0});
  const Widened wide_row(row);
  const Tensor bias(wide_row.view().data(), DType::f32, {out.dim(1)});
  multiply(wide_a.view(), wide_b.view(), wide_out.view(),
           {options.bias ? &bias : nullptr, options.accumulate});
  narrow(wide_out.view(), out);
}

}  // namespace tandem::cpu
