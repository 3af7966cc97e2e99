// quantize_rows on the CPU: each code is the nearest for the row's scale.
#include <cmath>
#include <limits>
#include <vector>

#include "tandem/error.h"
#include "tandem/quantize.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

class Quantize : public OnRanks {};

template <typename T>
float value_of(T x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else {
    return x.to_float();
  }
}

// Rows of random values of very different magnitudes.
template <typename T>
void check_rows(Communicator& comm, DType dtype) {
  constexpr int64_t kRows = 9, kColumns = 37;
  std::vector<T> x(kRows * kColumns);
  for (size_t i = 0; i < x.size(); ++i) {
    const float value = std::ldexp(2 * uniform(5, 1, i) - 1, int(i / kColumns) * 2 - 8);
    if constexpr (std::is_same_v<T, float>) {
      x[i] = value;
    } else {
      x[i] = T::from_float(value);
    }
  }
  std::vector<Float8E4M3> codes(x.size());
  std::vector<float> scales(kRows);
  quantize_rows(comm, Tensor(x.data(), dtype, {kRows, kColumns}),
                Tensor(codes.data(), DType::e4m3, {kRows, kColumns}),
                Tensor(scales.data(), DType::f32, {kRows}));
  for (size_t row = 0; row < kRows; ++row) {
    float maximum = 0, max_code = 0;
    for (size_t i = row * kColumns; i < (row + 1) * kColumns; ++i) {
      maximum = std::max(maximum, std::abs(value_of(x[i])));
      max_code = std::max(max_code, std::abs(codes[i].to_float()));
      // Half a step: 2^-4 of the value, or half of 2^-9 scales for subnormal codes.
      const float error = std::abs(codes[i].to_float() * scales[row] - value_of(x[i]));
      EXPECT_LE(error, std::max(0x1.01p-4f * std::abs(value_of(x[i])), 0x1.01p-10f * scales[row]));
    }
    EXPECT_EQ(scales[row], maximum / 448);
    EXPECT_EQ(max_code, 448);
  }
}

TEST_P(Quantize, CodesAreNearestForTheirScale) {
  run([](Communicator& comm) {
    check_rows<float>(comm, DType::f32);
    check_rows<BFloat16>(comm, DType::bf16);
    check_rows<Float16>(comm, DType::f16);
  });
}

TEST_P(Quantize, ZeroTinyAndInfiniteRowsAreHandled) {
  run([](Communicator& comm) {
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> x{0, -0.0f, 1.2e-38f, 0, 1, infinity, 2, std::nanf("")};
    std::vector<Float8E4M3> codes(8);
    std::vector<float> scales(4);
    quantize_rows(comm, Tensor(x.data(), DType::f32, {4, 2}),
                  Tensor(codes.data(), DType::e4m3, {4, 2}),
                  Tensor(scales.data(), DType::f32, {4}));
    EXPECT_EQ(scales, (std::vector<float>{0x1p-126f, 0x1p-126f, infinity, 2.0f / 448}));
    const std::vector<int> expected{0, 0x80, 0x38, 0, 0, 0x7f, 0x7e, 0x7f};
    for (size_t i = 0; i < 8; ++i) EXPECT_EQ(int(codes[i].bits), expected[i]) << i;
  });
}

TEST_P(Quantize, WrongTensorsAreNamed) {
  run([](Communicator& comm) {
    std::vector<float> memory(64);
    const auto tensor = [&](DType dtype, std::initializer_list<int64_t> shape) {
      return Tensor(memory.data(), dtype, shape);
    };
    const Tensor x = tensor(DType::f32, {2, 4}), codes = tensor(DType::e4m3, {2, 4}),
                 scales = tensor(DType::f32, {2});
    EXPECT_THROW(quantize_rows(comm, tensor(DType::i32, {2, 4}), codes, scales), InvalidArgument);
    EXPECT_THROW(quantize_rows(comm, x.transposed(), codes, scales), InvalidArgument);
    EXPECT_THROW(quantize_rows(comm, x, tensor(DType::u8, {2, 4}), scales), InvalidArgument);
    EXPECT_THROW(quantize_rows(comm, x, tensor(DType::e4m3, {4, 2}), scales), InvalidArgument);
    EXPECT_THROW(quantize_rows(comm, x, codes, tensor(DType::f32, {2, 1})), InvalidArgument);
    EXPECT_THROW(quantize_rows(comm, x, codes, tensor(DType::f32, {4})), InvalidArgument);
    const Tensor elsewhere(memory.data(), DType::f32, {2}, {DeviceKind::cuda, 0});
    EXPECT_THROW(quantize_rows(comm, x, codes, elsewhere), InvalidArgument);
  });
}

TANDEM_INSTANTIATE(Quantize);

}  // namespace
}  // namespace tandem::test
