#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "core/operands.h"
#include "core/random_buffer.h"
#include "core/system/process/thread_stacks.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tandem/tensor.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

TEST(Random, PhiloxKnownAnswer) {  // Random123's kat_vectors for philox4x32 10
  const std::array<uint32_t, 4> zero{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  EXPECT_EQ(philox(0, 0, 0), zero);
  const std::array<uint32_t, 4> ones{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), ones);
}

TEST(Random, NormalHasUnitMoments) {
  double sum = 0, squares = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const double x = normal(7, stream_of("w"), uint64_t(i));
    sum += x, squares += x * x;
  }
  EXPECT_NEAR(sum / kCount, 0, 0.02);
  EXPECT_NEAR(squares / kCount, 1, 0.02);
}

TEST(Random, NormalIsBoxAndMullersTransform) {
  for (uint64_t i = 0; i < 200000; ++i) {
    const auto words = philox(3, 1, i);
    const double u = (double(words[0]) + 1) * 0x1p-32, turns = double(words[1]) * 0x1p-32;
    const double expected = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * turns);
    ASSERT_NEAR(double(normal(3, 1, i)), expected, 1e-13 + 6e-8 * std::fabs(expected)) << i;
  }
}

TEST(Random, FilledValuesAreThoseOfOneCallEach) {
  for (const uint64_t first :
       std::initializer_list<uint64_t>{0, 77, 0xFFFFFF00, ~uint64_t{0} - 300}) {
    for (const size_t count : {0u, 1u, 3u, 16u, 255u, 256u, 257u, 1000u}) {
      std::vector<float> values(count + 1, 9);
      fill_normal(std::span(values).first(count), 5, 6, first);
      for (uint64_t i = 0; i < count; ++i) ASSERT_EQ(values[i], normal(5, 6, first + i)) << i;
      EXPECT_EQ(values[count], 9);
    }
  }
}

// Every f16 and bf16 pattern round-trips; every midpoint rounds to even.
template <typename Half>
void check_all_patterns() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = Half{uint16_t(bits)}.to_float();
    const Half back = Half::from_float(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(back.to_float())) << bits;
      continue;
    }
    EXPECT_EQ(back.bits, bits);
    const float next = Half{uint16_t(bits + 1)}.to_float();
    if ((bits & 0x7fff) == 0x7fff || !std::isfinite(value) || !std::isfinite(next)) continue;
    const double middle = (double(value) + double(next)) / 2;
    if (double(float(middle)) != middle) continue;
    const uint32_t even = bits & 1 ? bits + 1 : bits;
    EXPECT_EQ(Half::from_float(float(middle)).bits, even) << bits;
    EXPECT_EQ(Half::from_float(std::nextafter(float(middle), value)).bits, bits);
    EXPECT_EQ(Half::from_float(std::nextafter(float(middle), next)).bits, bits + 1);
  }
}

TEST(DType, Float16IsExact) {
  check_all_patterns<Float16>();
}
TEST(DType, BFloat16IsExact) {
  check_all_patterns<BFloat16>();
}

TEST(DType, OverflowBecomesInfinity) {
  EXPECT_EQ(Float16::from_float(65519.99f).bits, 0x7bff);
  EXPECT_EQ(Float16::from_float(65520.0f).bits, 0x7c00);
  EXPECT_EQ(Float16::from_float(-1e30f).bits, 0xfc00);
  EXPECT_EQ(BFloat16::from_float(3.4e38f).bits, 0x7f80);
}

// Every code round-trips; every midpoint rounds to even, values next to it to the nearer code.
TEST(DType, Float8E4M3IsExact) {
  for (uint32_t bits = 0; bits < 0x100; ++bits) {
    const float value = Float8E4M3{uint8_t(bits)}.to_float();
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << bits;
      continue;
    }
    // Definition: 1.mantissa x 2^(exponent - 7), or 0.mantissa x 2^-6.
    const int exponent = int(bits >> 3) & 15;
    const double expected =
        std::ldexp(exponent ? 8 + (bits & 7) : bits & 7, (exponent ? exponent : 1) - 10);
    EXPECT_EQ(double(value), bits & 0x80 ? -expected : expected) << bits;
    EXPECT_EQ(Float8E4M3::from_float(value).bits, bits);
    if ((bits & 0x7f) >= 0x7e) continue;
    const float next = Float8E4M3{uint8_t(bits + 1)}.to_float(), middle = (value + next) / 2;
    EXPECT_EQ(Float8E4M3::from_float(middle).bits, bits & 1 ? bits + 1 : bits);
    EXPECT_EQ(Float8E4M3::from_float(std::nextafter(middle, value)).bits, bits);
    EXPECT_EQ(Float8E4M3::from_float(std::nextafter(middle, next)).bits, bits + 1);
    EXPECT_EQ(Float8E4M3::from_float(std::nextafter(next, value)).bits, bits + 1);
  }
}

TEST(DType, Float8E4M3SaturatesAndKeepsNaN) {
  const auto code = [](float value) { return int(Float8E4M3::from_float(value).bits); };
  for (const float beyond : {448.0f, 463.9f, 464.0f, 480.0f, 1e30f, HUGE_VALF}) {
    EXPECT_EQ(code(beyond), 0x7e) << beyond;
    EXPECT_EQ(code(-beyond), 0xfe) << beyond;
  }
  EXPECT_EQ(code(std::nanf("")), 0x7f);
  EXPECT_EQ(code(-std::nanf("")), 0x7f);
  EXPECT_EQ(code(0x1p-10f), 0);  // a tie between 0 and 2^-9
  EXPECT_EQ(code(std::nextafter(0x1p-10f, 1.0f)), 1);
  EXPECT_EQ(code(-0x1p-11f), 0x80);
  EXPECT_EQ(code(1e-45f), 0);
  EXPECT_EQ(code(-0.0f), 0x80);
}

TEST(DType, ParseErrorsListTheChoices) {
  EXPECT_EQ(parse_dtype("bf16"), DType::bf16);
  EXPECT_EQ(parse_dtype("e4m3"), DType::e4m3);
  try {
    parse_dtype("fp32");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "dtype 'fp32': expected f32, bf16, f16, i32, u8 or e4m3");
  }
}

TEST(Tensor, ViewsShareMemory) {
  std::vector<float> data(12);
  const Tensor t(data.data(), DType::f32, {4, 3});
  EXPECT_EQ(t.describe(), "f32[4, 3]");
  EXPECT_EQ(t.rows(1, 2).data(), data.data() + 3);
  EXPECT_EQ(t.transposed().stride(1), 3);
  EXPECT_FALSE(t.transposed().contiguous());
  EXPECT_TRUE(t.rows(4, 0).contiguous());
  EXPECT_THROW(t.rows(3, 2), InvalidArgument);
  EXPECT_THROW(Tensor(nullptr, DType::f32, {-1}), InvalidArgument);
}

TEST(Tensor, NarrowsAnyDimension) {
  std::vector<float> data(24);
  const Tensor t(data.data(), DType::f32, {4, 3, 2});
  const Tensor narrowed = t.narrow(1, 1, 2);
  EXPECT_EQ(narrowed.describe(), "f32[4, 2, 2]");
  EXPECT_EQ(narrowed.data(), data.data() + 2);
  EXPECT_EQ(narrowed.stride(0), 6);
  EXPECT_FALSE(narrowed.contiguous());
  EXPECT_EQ(t.narrow(-1, 1, 1).data(), data.data() + 1);
  EXPECT_EQ(t.narrow(0, 4, 0).elements(), 0);
  EXPECT_EQ(error_of<InvalidArgument>([&] { t.narrow(1, 2, 2); }),
            "2 from 2 of dimension 1 of f32[4, 3, 2]: out of range");
  EXPECT_EQ(error_of<InvalidArgument>([&] { t.narrow(3, 0, 1); }),
            "dimension 3 of f32[4, 3, 2]: expected one of its 3");
  EXPECT_THROW(t.narrow(0, 1, std::numeric_limits<int64_t>::max()), InvalidArgument);
  EXPECT_THROW(t.narrow(0, -1, 1), InvalidArgument);
  EXPECT_THROW(t.narrow(-4, 0, 1), InvalidArgument);
}

TEST(Tensor, TakesStrides) {
  std::vector<float> data(24);
  const Tensor t(data.data(), DType::f32, {2, 3}, {12, 2});
  EXPECT_EQ(t.stride(0), 12);
  EXPECT_EQ(t.rows(1, 1).data(), data.data() + 12);
  EXPECT_FALSE(t.contiguous());
  EXPECT_TRUE(Tensor(data.data(), DType::f32, {1, 3}, {99, 1}).contiguous());
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              Tensor(data.data(), DType::f32, {2, 3}, {3});
            }),
            "f32[2, 3] has 1 strides: expected 2");
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              Tensor(data.data(), DType::f32, {2, 3}, {-3, 1});
            }),
            "f32[2, 3]: stride -3 of dimension 0: expected at least 0");
  const int64_t large = int64_t(1) << 61;
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              Tensor(data.data(), DType::f32, {2, 2}, {large, 1});
            }),
            "f32[2, 2]: expected less than 2^63 bytes");
  EXPECT_THROW(Tensor(nullptr, DType::f32, {large}), InvalidArgument);
  EXPECT_THROW(Tensor(nullptr, DType::u8, {large, 4}), InvalidArgument);
  EXPECT_NO_THROW(Tensor(nullptr, DType::u8, {large, 2}));
}

TEST(Tensor, IsMadeOfTypedMemory) {
  std::vector<float> floats(6);
  const std::vector<BFloat16> halves(6);
  const Tensor t = Tensor::of(std::span(floats), {2, 3});
  EXPECT_EQ(t.describe(), "f32[2, 3]");
  EXPECT_EQ(t.data(), floats.data());
  EXPECT_FALSE(t.read_only());
  EXPECT_EQ(Tensor::of(std::span(halves), {6}).dtype(), DType::bf16);
  EXPECT_TRUE(Tensor::of(std::span(halves), {6}).read_only());
  const Device gpu{DeviceKind::cuda, 1};
  EXPECT_EQ(Tensor::of(static_cast<Float16*>(nullptr), {8, 8}, gpu).device(), gpu);
  EXPECT_EQ(dtype_of<int32_t>(), DType::i32);
  EXPECT_EQ(dtype_of<uint8_t>(), DType::u8);
  EXPECT_EQ(dtype_of<Float8E4M3>(), DType::e4m3);
  EXPECT_EQ(error_of<InvalidArgument>([&] {
              Tensor::of(std::span(floats), {2, 4});
            }),
            "f32[2, 4] over 6 values: expected 8");
  EXPECT_EQ(t.data_as<float>(), floats.data());
  EXPECT_EQ(error_of<InvalidArgument>([&] { t.data_as<BFloat16>(); }),
            "data of f32[2, 3] as bf16: expected f32");
}

TEST(Tensor, OfConstMemoryIsReadOnly) {
  const std::vector<float> data(12);
  const Tensor t(data.data(), DType::f32, {4, 3});
  EXPECT_TRUE(t.read_only());
  EXPECT_TRUE(t.rows(1, 2).transposed().narrow(0, 0, 1).read_only());
  EXPECT_TRUE(Tensor(data.data(), DType::f32, {2, 3}, {6, 1}).read_only());
  const Device gpu{DeviceKind::cuda, 1};
  EXPECT_EQ(Tensor(data.data(), DType::f32, {12}, gpu).device(), gpu);
  EXPECT_EQ(t.data_as<const float>(), data.data());
  EXPECT_EQ(error_of<InvalidArgument>([&] { t.data_as<float>(); }),
            "data of f32[4, 3], read-only: expected a const element type");
  std::vector<float> local(12);
  const Tensor writable(local.data(), DType::f32, {4, 3});
  EXPECT_FALSE(writable.read_only());
  EXPECT_TRUE(writable.as_read_only().read_only());
  EXPECT_FALSE(Tensor(nullptr, DType::f32, {0}).read_only());
}

TEST(Operands, OverlapFromTheFirstElementToTheLast) {
  std::vector<float> data(64);
  const Tensor wide(data.data(), DType::f32, {4, 8});
  const auto overlap = [](const Tensor& a, const Tensor& b) {
    return byte_range(a).overlaps(byte_range(b));
  };
  EXPECT_TRUE(overlap(wide, wide));
  EXPECT_FALSE(overlap(wide.rows(0, 2), wide.rows(2, 2)));
  EXPECT_TRUE(overlap(wide.narrow(1, 0, 4), wide.narrow(1, 4, 4)));  // interleaved rows
  EXPECT_FALSE(overlap(wide.rows(0, 1).narrow(1, 0, 4), wide.rows(0, 1).narrow(1, 4, 4)));
  EXPECT_FALSE(overlap(wide, wide.narrow(1, 3, 0)));
  EXPECT_EQ(byte_range(wide.narrow(1, 2, 3)).end - byte_range(wide.narrow(1, 2, 3)).begin,
            (3 * 8 + 3) * sizeof(float));
  EXPECT_EQ(byte_range(wide.transposed()), byte_range(wide));
}

TEST(Memory, IsAlignedAndChecked) {
  const Memory buffer(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
  EXPECT_NO_THROW(buffer.view(DType::f32, {25}));
  EXPECT_THROW(buffer.view(DType::f32, {26}), InvalidArgument);
}

TEST(RandomBuffer, IsRandomToTheLastElement) {
  for (const int64_t elements : {int64_t(0), int64_t(1), int64_t(4097), int64_t(20000)}) {
    const Memory f32 = random_buffer(DType::f32, elements, 3);
    const Memory bf16 = random_buffer(DType::bf16, elements, 3);
    double sum = 0;
    for (int64_t i = 0; i < elements; ++i) {
      const float value = reinterpret_cast<const float*>(f32.data())[i];
      ASSERT_TRUE(value >= -1 && value < 1 && value != 0) << i;
      ASSERT_EQ(reinterpret_cast<const BFloat16*>(bf16.data())[i].to_float(),
                BFloat16::from_float(value).to_float());
      sum += double(value);
    }
    EXPECT_LE(std::abs(sum), 0.05 * double(elements) + 1);
  }
  EXPECT_THROW(random_buffer(DType::u8, 1, 3), InvalidArgument);
}

TEST(ThreadStacks, NameTheFunctionAThreadIsIn) {
  std::atomic<pid_t> id{0};
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  std::thread thread([&] {
    id = this_thread_id();
    pollfd readable{pipe_ends[0], POLLIN, 0};
    while (poll(&readable, 1, -1) < 0 && errno == EINTR) {
    }
  });
  while (id == 0) std::this_thread::yield();
  std::string stack;
  for (int i = 0; i < 50 && stack.find("poll") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    stack = stack_of_thread(id);
  }
  EXPECT_NE(stack.find("poll"), std::string::npos) << stack;
  EXPECT_NE(stack.find(" < "), std::string::npos) << stack;
  EXPECT_NE(stack_of_thread(this_thread_id()), "");
  ASSERT_EQ(write(pipe_ends[1], "x", 1), 1);
  thread.join();
  EXPECT_EQ(stack_of_thread(id), "");
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

// A compiler that makes one instruction of a product and a sum rounds once, where it likes.
TEST(Arithmetic, ProductsAreRoundedBeforeTheyAreAdded) {
  volatile float given = 1 + 0x1p-12f;
  const float x = given;
  EXPECT_EQ(x * x - (1 + 0x1p-11f), 0);
}

}  // namespace
}  // namespace tandem
