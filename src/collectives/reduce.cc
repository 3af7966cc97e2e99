#include "collectives/reduce.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace tandem::collectives {
namespace {

// Small enough that the accumulator stays in the L1 cache.
constexpr int64_t kBlock = 1024;

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, uint32_t>, uint32_t, float>;

inline float widen(float x) {
  return x;
}
inline float widen(BFloat16 x) {
  return x.to_float();
}
inline float widen(Float16 x) {
  return x.to_float();
}
inline uint32_t widen(uint32_t x) {
  return x;
}

template <typename T>
inline T narrow(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    return x;
  } else {
    return T::from_float(x);
  }
}

inline float larger(float a, float b) {
  return a > b || a != a ? a : b;
}
inline uint32_t larger(uint32_t a, uint32_t b) {
  return int32_t(a) > int32_t(b) ? a : b;
}

template <typename T, ReduceOp op>
void reduce_as(std::span<const std::byte* const> sources, std::byte* out, int64_t count) {
  Accumulator<T> sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const auto* first = reinterpret_cast<const T*>(sources[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = widen(first[i]);
    for (const std::byte* source : sources.subspan(1)) {
      const auto* x = reinterpret_cast<const T*>(source) + begin;
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (op == ReduceOp::sum) {
          sum[i] += widen(x[i]);
        } else {
          sum[i] = larger(sum[i], widen(x[i]));
        }
      }
    }
    auto* to = reinterpret_cast<T*>(out) + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = narrow<T>(sum[i]);
  }
}

template <typename T>
void reduce_with(ReduceOp op, std::span<const std::byte* const> sources, std::byte* out,
                 int64_t count) {
  switch (op) {
    case ReduceOp::sum:
      return reduce_as<T, ReduceOp::sum>(sources, out, count);
    case ReduceOp::max:
      return reduce_as<T, ReduceOp::max>(sources, out, count);
  }
}

}  // namespace

void require_reducible(const char* op, DType dtype) {
  if (dtype == DType::u8 || dtype == DType::e4m3) {
    throw InvalidArgument(
        fmt::format("{}: dtype {}: expected f32, bf16, f16 or i32", op, name_of(dtype)));
  }
}

void reduce(DType dtype, ReduceOp op, std::span<const std::byte* const> sources, std::byte* out,
            int64_t count) {
  switch (dtype) {
    case DType::f32:
      return reduce_with<float>(op, sources, out, count);
    case DType::bf16:
      return reduce_with<BFloat16>(op, sources, out, count);
    case DType::f16:
      return reduce_with<Float16>(op, sources, out, count);
    case DType::i32:
      return reduce_with<uint32_t>(op, sources, out, count);
    case DType::u8:
    case DType::e4m3:
      break;
  }
  require_reducible("reduce", dtype);
}

}  // namespace tandem::collectives
