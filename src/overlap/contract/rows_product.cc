#include "overlap/contract/rows_product.h"

#include <array>

#include "core/cpu/float_mode.h"
#include "core/cpu/parallel.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

constexpr std::array<float, 256> kValues = [] {
  std::array<float, 256> values{};
  for (size_t code = 0; code < values.size(); ++code) {
    values[code] = Float8E4M3{uint8_t(code)}.to_float();
  }
  return values;
}();

/// Values of the codes, whose rows are dense, without a scale.
void decode(const Tensor& codes, const Tensor& values) {
  const int64_t columns = codes.dim(1);
  cpu::parallel_ranges(codes.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* const from = codes.as<Float8E4M3>() + row * codes.stride(0);
      float* const to = values.as<float>() + row * columns;
      for (int64_t i = 0; i < columns; ++i) to[i] = kValues[from[i].bits];
    }
  });
}

float value_of(float x) {
  return x;
}
float value_of(BFloat16 x) {
  return x.to_float();
}
void assign(float& to, float x) {
  to = x;
}
void assign(BFloat16& to, float x) {
  to = BFloat16::from_float(x);
}

struct RowScales {
  const float *x, *weight;
  bool by_row;
};

template <typename Out>
void scale(const Tensor& product, const RowScales& scales, const Tensor& out, const Tensor* bias) {
  const int64_t columns = out.dim(1), step = scales.by_row ? 1 : 0;
  const Out* const add = bias ? bias->as<Out>() : nullptr;
  cpu::parallel_ranges(out.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* const from = product.as<float>() + row * columns;
      Out* const to = out.as<Out>() + row * out.stride(0);
      const float of_row = scales.x[row * step];
      for (int64_t i = 0; i < columns; ++i) {
        const float value = from[i] * (of_row * scales.weight[i * step]);
        assign(to[i], add ? value + value_of(add[i]) : value);
      }
    }
  });
}

Memory floats(bool needed, int64_t rows, int64_t columns) {
  return Memory(needed ? size_t(rows * columns) * sizeof(float) : 0);
}

}  // namespace

RowsProduct::RowsProduct(const OpDesc& desc)
    : desc_(desc),
      weight_(floats(desc.scaled(), desc.n, desc.k)),
      x_(floats(desc.scaled(), desc.m, desc.k)),
      product_(floats(desc.scaled(), desc.m, desc.n)) {}

void RowsProduct::begin(const Operands& operands) {
  operands_ = &operands;
  if (desc_.scaled()) decode(operands.weight, weight_.view(DType::f32, {desc_.n, desc_.k}));
}

void RowsProduct::run(const Tensor& x, const float* scales, const Tensor& out, const Tensor* bias) {
  if (!desc_.scaled()) return gemm(x, operands_->weight.transposed(), out, {bias, false});
  const Tensor values = x_.view(DType::f32, {x.dim(0), desc_.k});
  const Tensor product = product_.view(DType::f32, {x.dim(0), desc_.n});
  decode(x, values);
  gemm(values, weight_.view(DType::f32, {desc_.n, desc_.k}).transposed(), product);
  const cpu::FloatMode mode;
  const RowScales all{scales, operands_->scales->weight.as<const float>(), desc_.scaled_by_row()};
  if (out.dtype() == DType::f32) return scale<float>(product, all, out, bias);
  scale<BFloat16>(product, all, out, bias);
}

void RowsProduct::run_local(int64_t begin, int64_t count, const Tensor& out, const Tensor* bias) {
  const float* scales = nullptr;
  if (desc_.scaled()) {
    scales = operands_->scales->x.as<const float>() + (desc_.scaled_by_row() ? begin : 0);
  }
  run(operands_->x.rows(begin, count), scales, out, bias);
}

}  // namespace tandem
