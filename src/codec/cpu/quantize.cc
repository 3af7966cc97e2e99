#include "codec/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/cpu/float_mode.h"
#include "core/cpu/parallel.h"

namespace tandem {
namespace {

float value_of(float x) {
  return x;
}
template <typename Half>
float value_of(Half x) {
  return x.to_float();
}

template <typename T>
float scale_of(const T* row, int64_t columns, int64_t stride) {
  float maximum = 0;
  for (int64_t i = 0; i < columns; ++i) {
    maximum = std::fmax(maximum, std::fabs(value_of(row[i * stride])));
  }
  return std::max(maximum / Float8E4M3::kMax, std::numeric_limits<float>::min());
}

/// Rows [begin, end).
template <typename T>
void quantize(const Tensor& x, const QuantizedRows& to, bool has_scales, int64_t begin,
              int64_t end) {
  const int64_t columns = x.dim(1), stride = x.stride(1);
  for (int64_t row = begin; row < end; ++row) {
    const T* in = x.as<T>() + row * x.stride(0);
    auto* out = to.codes.as<Float8E4M3>() + row * columns;
    const float scale = has_scales ? scale_of(in, columns, stride) : 1.0f;
    to.scales.as<float>()[row] = scale;
    for (int64_t i = 0; i < columns; ++i) {
      out[i] = Float8E4M3::from_float(value_of(in[i * stride]) / scale);
    }
  }
}

void quantize(const Tensor& x, const QuantizedRows& to, bool has_scales) {
  const cpu::FloatMode mode;
  cpu::parallel_ranges(x.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    switch (x.dtype()) {
      case DType::f32:
        return quantize<float>(x, to, has_scales, begin, end);
      case DType::bf16:
        return quantize<BFloat16>(x, to, has_scales, begin, end);
      case DType::f16:
        return quantize<Float16>(x, to, has_scales, begin, end);
      case DType::i32:
      case DType::u8:
      case DType::e4m3:
        break;
    }
  });
}

}  // namespace

void quantize_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales) {
  quantize(x, {codes, scales}, true);
}

void round_rows_on_cpu(const Tensor& x, const Tensor& codes, const Tensor& scales) {
  quantize(x, {codes, scales}, false);
}

void dequantize_rows(const Tensor& codes, const Tensor& scales, const Tensor& x) {
  const int64_t columns = codes.dim(1);
  cpu::parallel_ranges(codes.dim(0), cpu::kMinRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float scale = scales.as<float>()[row];
      const auto* in = codes.as<Float8E4M3>() + row * columns;
      float* out = x.as<float>() + row * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] = in[i].to_float() * scale;
    }
  });
}

}  // namespace tandem
