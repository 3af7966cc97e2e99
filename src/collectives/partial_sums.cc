#include "collectives/partial_sums.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace tandem {
namespace {

constexpr int64_t kBlock = 512;  // columns summed at a time: the sums stay in the L1 cache

inline float value(float x) {
  return x;
}
inline float value(BFloat16 x) {
  return x.to_float();
}
inline void assign(float& out, float x) {
  out = x;
}
inline void assign(BFloat16& out, float x) {
  out = BFloat16::from_float(x);
}

template <typename In, typename Out>
void reduce(std::span<const std::byte* const> partials, const Tensor* bias, const Tensor& out,
            const Tensor* residual) {
  const int64_t rows = out.dim(0), columns = out.dim(1);
  std::array<float, kBlock> sums;
  for (int64_t row = 0; row < rows; ++row) {
    Out* to = out.as<Out>() + row * out.stride(0);
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
      const int64_t count = std::min(kBlock, columns - begin);
      const int64_t at = row * columns + begin;
      const In* first = reinterpret_cast<const In*>(partials[0]) + at;
      for (int64_t j = 0; j < count; ++j) sums[size_t(j)] = value(first[j]);
      for (const std::byte* partial : partials.subspan(1)) {
        const In* from = reinterpret_cast<const In*>(partial) + at;
        for (int64_t j = 0; j < count; ++j) sums[size_t(j)] += value(from[j]);
      }
      if (bias) {
        const Out* add = bias->as<Out>() + begin;
        for (int64_t j = 0; j < count; ++j) sums[size_t(j)] += value(add[j]);
      }
      if (residual) {
        const Out* add = residual->as<Out>() + row * residual->stride(0) + begin;
        for (int64_t j = 0; j < count; ++j) sums[size_t(j)] += value(add[j]);
      }
      for (int64_t j = 0; j < count; ++j) assign(to[begin + j], sums[size_t(j)]);
    }
  }
}

}  // namespace

void reduce_partials(std::span<const std::byte* const> partials, DType dtype, const Tensor* bias,
                     const Tensor& out, const Tensor* residual) {
  if (out.elements() == 0) return;
  if (dtype == DType::f32) {
    reduce<float, float>(partials, bias, out, residual);
  } else if (out.dtype() == DType::f32) {
    reduce<BFloat16, float>(partials, bias, out, residual);
  } else {
    reduce<BFloat16, BFloat16>(partials, bias, out, residual);
  }
}

void copy_rows(const std::byte* source, const Tensor& out) {
  const size_t row_bytes = size_t(out.dim(1)) * size_of(out.dtype());
  if (out.elements() == 0) return;
  if (out.contiguous()) {
    std::memcpy(out.data(), source, out.bytes());
    return;
  }
  for (int64_t row = 0; row < out.dim(0); ++row) {
    std::memcpy(out.rows(row, 1).data(), source + size_t(row) * row_bytes, row_bytes);
  }
}

void copy_rows(const Tensor& source, std::byte* out) {
  const size_t row_bytes = size_t(source.dim(1)) * size_of(source.dtype());
  if (source.elements() == 0) return;
  if (source.contiguous()) {
    std::memcpy(out, source.data(), source.bytes());
    return;
  }
  for (int64_t row = 0; row < source.dim(0); ++row) {
    std::memcpy(out + size_t(row) * row_bytes, source.rows(row, 1).data(), row_bytes);
  }
}

}  // namespace tandem
