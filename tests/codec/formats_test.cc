// Every format on values of every kind: errors within the documented bound, NaN where documented,
// and the same bytes from encoding one value at a time as sixteen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/lossless.h"
#include "codec/message.h"
#include "tandem/codec.h"
#include "tandem/error.h"
#include "tests/codec/reference.h"
#include "tests/codec/round_trip.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

constexpr int64_t kCounts[] = {1, 5, 127, 128, 129, 1000, 2048, 2049, 5000};

class Formats : public testing::TestWithParam<std::string> {
 protected:
  const Wire wire = Wire::parse(GetParam());

  /// log2 scales end at 2^19.5.
  bool reaches(const Input& input) const {
    if (wire.scale != ScaleKind::log2) return true;
    return std::all_of(input.values.begin(), input.values.end(),
                       [](float x) { return std::fabs(x) < 0x1p19f; });
  }
  template <typename T>
  void expect_within_the_bound() const {
    for (const int64_t count : kCounts) {
      for (const Input& input : finite_inputs(count)) {
        if (!reaches(input)) continue;
        const auto values = as<T>(input.values);
        EXPECT_LE(worst(wire, values, round_trip(wire, values)), 1)
            << input.name << ", " << count << " of " << name_of(dtype_of<T>());
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, Formats, testing::ValuesIn(all_wires()), [](const auto& instance) {
  std::string name = instance.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

TEST_P(Formats, ErrorsAreWithinTheBound) {
  expect_within_the_bound<float>();
  expect_within_the_bound<BFloat16>();
  expect_within_the_bound<Float16>();
}

TEST_P(Formats, EncodingOneAtATimeGivesTheSameBytes) {
  for (const int64_t count : {int64_t(1), int64_t(200), int64_t(2048), int64_t(5000)}) {
    for (Input input : finite_inputs(count)) {
      if (count > 100) input.values[77] = NAN, input.values[150] = -INFINITY;
      const Tensor x = Tensor::of(std::span(input.values), {count});
      std::vector<std::byte> message(wire.bytes(count, DType::f32), std::byte(0xa5));
      encode(wire, x, message);
      EXPECT_EQ(message, reference_message(wire, input.values, DType::f32)) << input.name;
      std::vector<float> decoded(static_cast<size_t>(count));
      decode(wire, message, Tensor::of(std::span(decoded), {count}));
      const auto expected = reference_values(wire, message, count);
      for (size_t k = 0; k < decoded.size(); ++k) {
        ASSERT_TRUE(std::bit_cast<uint32_t>(decoded[k]) == std::bit_cast<uint32_t>(expected[k]) ||
                    (std::isnan(decoded[k]) && std::isnan(expected[k])))
            << input.name << ", element " << k;
      }
    }
  }
}

TEST_P(Formats, NaNDoesNotLeaveItsGroup) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> values = uniform_values(40, 3 * wire.group);
    values[size_t(wire.group) + 3] = bad;
    const auto decoded = round_trip(wire, values);
    for (int i = 0; i < 3 * wire.group; ++i) {
      EXPECT_EQ(std::isnan(decoded[size_t(i)]), i / wire.group == 1) << i << " beside " << bad;
    }
  }
}

/// Bit pattern of the NaNs if all have the same, else 0.
template <typename T>
uint32_t bits_of_nans(const std::vector<T>& values) {
  uint32_t found = 0;
  for (const T& value : values) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    float x;
    if constexpr (std::is_same_v<T, float>) x = value;
    if constexpr (!std::is_same_v<T, float>) x = value.to_float();
    if (!std::isnan(x)) continue;
    if (found != 0 && found != bits) return 0;
    found = bits;
  }
  return found;
}

TEST_P(Formats, NaNHasOneBitPattern) {
  const float from_nan = std::bit_cast<float>(0xffc12345u);
  for (const float bad : {NAN, -NAN, from_nan, INFINITY, -INFINITY}) {
    for (const size_t at : {size_t(0), size_t(3), size_t(wire.group) - 1}) {
      std::vector<float> values(size_t(2 * wire.group) + 3, 1.0f);
      values[at] = values.back() = bad;
      EXPECT_EQ(bits_of_nans(round_trip(wire, values)), 0x7fc00000u) << bad << " at " << at;
      EXPECT_EQ(bits_of_nans(round_trip(wire, as<BFloat16>(values))), 0x7fc0u) << bad;
      if (std::isinf(bad)) continue;  // as<Float16> clamps it
      EXPECT_EQ(bits_of_nans(round_trip(wire, as<Float16>(values))), 0x7e00u) << bad;
    }
  }
}

TEST_P(Formats, AnyNaNScaleDecodesAsTheCanonicalNaN) {
  const size_t bytes = size_t(codec::scale_bytes(wire.scale));
  if (bytes == 1) return;  // 255 is the only NaN there
  const int64_t count = wire.group;
  const std::vector<float> values(size_t(count), 1.0f);
  std::vector<std::byte> message(wire.bytes(count, DType::f32));
  encode(wire, Tensor::of(std::span(values), {count}), message);
  const uint32_t negative = bytes == 4 ? 0xffc12345u : 0xffc1u;
  std::memcpy(&message[codec::Message::of(wire, count).scales], &negative, bytes);
  std::vector<float> decoded(values.size());
  decode(wire, message, Tensor::of(std::span(decoded), {count}));
  EXPECT_EQ(bits_of_nans(decoded), 0x7fc00000u);
  std::vector<BFloat16> halves(values.size());
  decode(wire, message, Tensor::of(std::span(halves), {count}));
  EXPECT_EQ(bits_of_nans(halves), 0x7fc0u);
}

TEST_P(Formats, ZerosStayZeros) {
  if (wire.asymmetric) return;
  for (const float x : round_trip(wire, std::vector<float>(300, -0.0f))) {
    EXPECT_EQ(x, 0);
  }
}

TEST(Formats, BoundsHoldOnManyValues) {
  const int64_t count = 1 << 20;
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[size_t(i)] = uniform(50, i) * uniform(51, i);
  for (const std::string& text : all_wires()) {
    const Wire wire = Wire::parse(text);
    EXPECT_LE(worst(wire, values, round_trip(wire, values)), 1) << text;
  }
}

// A power-of-two scale per group reaches all of f32's range: no value is refused or becomes
// infinite. The power of two after largest / 6 may be so large that not all codes are used.
TEST(Mx, CoversTheRangeOfF32) {
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const char* format : {"mxfp4", "mxfp6", "mxfp8"}) {
    const Wire wire = Wire::parse(format);
    std::vector<float> values(128, 1.0f);
    values[0] = kMax, values[1] = -kMax, values[2] = kMax / 2;  // 1 is negligible next to them
    values[32] = 0x1p-126f, values[33] = -0x1p-126f;
    std::fill(values.begin() + 34, values.begin() + 64, 0.0f);
    const auto decoded = round_trip(wire, values);
    EXPECT_LE(worst(wire, values, decoded), 1) << format;
    for (const float x : decoded) EXPECT_TRUE(std::isfinite(x)) << format;
    EXPECT_GT(decoded[0], kMax / 2) << format;
    EXPECT_EQ(decoded[1], -decoded[0]) << format;
    EXPECT_EQ(decoded[3], 0) << format;
    EXPECT_EQ(decoded[32], 0x1p-126f) << format;
    EXPECT_EQ(decoded[64], 1) << format;
  }
}

// Holds even if a group needs a scale larger than any of bf16.
TEST_P(Formats, FiniteValuesStayFiniteUpToTheEndOfTheRange) {
  if (wire.scale == ScaleKind::log2) return;
  constexpr float kMax = std::numeric_limits<float>::max();
  for (const float maximum :
       {kMax, std::nextafter(kMax, 0.0f), 0x1.ffp127f, 0x1.fe0002p127f, 0x1.fep127f, 0x1p127f}) {
    std::vector<float> values(256, 1.0f);
    values[0] = maximum, values[1] = -maximum, values[2] = maximum / 2, values[130] = -maximum;
    const auto decoded = round_trip(wire, values);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(std::isfinite(decoded[i])) << "element " << i << " of " << maximum;
    }
    EXPECT_LE(worst(wire, values, decoded), 1) << maximum;
  }
}

TEST(Log2, TooLargeValuesBecomeNaN) {
  std::vector<float> values(256, 1.0f);
  values[130] = 0x1p30f;
  const auto decoded = round_trip(Wire::parse("int8:log2"), values);
  EXPECT_NEAR(decoded[0], 1, 0.01);
  for (int i = 128; i < 256; ++i) EXPECT_TRUE(std::isnan(decoded[size_t(i)]));
}

TEST(Spikes, SmallestAndLargestAreExact) {
  std::vector<float> values = uniform_values(60, 128);
  values[17] = 1024, values[90] = -512;
  const auto decoded = round_trip(Wire::parse("int2:spikes"), values);
  EXPECT_EQ(decoded[17], 1024);
  EXPECT_EQ(decoded[90], -512);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(decoded[i], values[i], 0.51) << i;
}

TEST(Lossless, EveryBitPatternRoundTrips) {
  std::vector<BFloat16> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = uint16_t(i);
  for (const uint32_t stride : {1u, 257u, 40503u}) {
    std::vector<BFloat16> shuffled(values.size());
    for (size_t i = 0; i < values.size(); ++i) shuffled[i] = values[i * stride & 0xffff];
    const auto decoded = round_trip(Wire::parse("lossless"), shuffled);
    EXPECT_EQ(std::memcmp(decoded.data(), shuffled.data(), 2 * decoded.size()), 0);
  }
}

TEST(Lossless, AnySizeRoundTrips) {
  for (const int64_t count : {0, 1, 1023, 1024, 1025, 2047, 3000, 100003}) {
    for (Input input : finite_inputs(count)) {
      if (count > 100) input.values[50] = NAN, input.values[51] = -INFINITY;
      const auto halves = as<BFloat16>(input.values);
      const auto decoded = round_trip(Wire::parse("lossless"), halves);
      EXPECT_TRUE(count == 0 || !std::memcmp(decoded.data(), halves.data(), 2 * size_t(count)))
          << input.name << ", " << count;
      const auto words = round_trip(Wire::parse("lossless"), input.values);
      EXPECT_TRUE(count == 0 || !std::memcmp(words.data(), input.values.data(), 4 * size_t(count)));
    }
  }
}

TEST(Lossless, TakesTwelveBitsForRealValuesAndNeverMoreThanRaw) {
  const Wire wire = Wire::parse("lossless");
  std::vector<BFloat16> values(1 << 18), noise(1 << 18);
  for (size_t i = 0; i < values.size(); ++i) {
    float x = 0;
    for (uint64_t k = 0; k < 6; ++k) x += uniform(70 + k, int64_t(i));
    values[i] = BFloat16::from_float(x);
    noise[i].bits = uint16_t(philox(24, 80, i)[0]);
  }
  std::vector<std::byte> message(wire.bytes(1 << 18, DType::bf16));
  const size_t coded = encode(wire, Tensor::of(std::span(values), {1 << 18}), message);
  EXPECT_LT(8.0 * double(coded) / double(values.size()), 12.15);
  const size_t raw = encode(wire, Tensor::of(std::span(noise), {1 << 18}), message);
  EXPECT_LE(raw, 2 * noise.size() + 16);
  EXPECT_LE(double(wire.bytes(1024, DType::bf16)), 1.01 * 2048);
}

}  // namespace
}  // namespace tandem::test
