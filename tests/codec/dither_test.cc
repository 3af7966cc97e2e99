// Stochastic rounding: unbiased, within one step, the same bytes from one value at a time; rounding
// to nearest, the control, is biased.
#include <gmock/gmock.h>

#include <cstring>

#include "codec/dither.h"
#include "tests/codec/reference.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using codec::Dither;
using testing::HasSubstr;

std::vector<std::string> integer_wires() {
  std::vector<std::string> all;
  for (const std::string& text : all_wires()) {
    const Wire wire = Wire::parse(text);
    if (codec::can_dither(wire)) all.push_back(text);
  }
  return all;
}

std::vector<std::byte> dithered(const Wire& wire, const std::vector<float>& values,
                                const Dither& dither) {
  const int64_t count = int64_t(values.size());
  std::vector<std::byte> message(wire.bytes(count, DType::f32), std::byte(0xa5));
  codec::encode_dithered(wire, Tensor::of(std::span(values), {count}), dither, message);
  return message;
}

std::vector<float> decoded_of(const Wire& wire, const std::vector<std::byte>& message,
                              size_t count) {
  std::vector<float> values(count);
  decode(wire, message, Tensor::of(std::span(values), {int64_t(count)}));
  return values;
}

class Dithering : public testing::TestWithParam<std::string> {
 protected:
  const Wire wire = Wire::parse(GetParam());
};
INSTANTIATE_TEST_SUITE_P(All, Dithering, testing::ValuesIn(integer_wires()),
                         [](const auto& instance) {
                           std::string name = instance.param;
                           std::replace(name.begin(), name.end(), ':', '_');
                           return name;
                         });

TEST_P(Dithering, EncodingOneAtATimeGivesTheSameBytes) {
  const Dither dither{0x123456789abcdef0u, 77};
  for (const int64_t count : {1, 200, 2048, 5000}) {
    for (Input input : finite_inputs(count)) {
      if (count > 100) input.values[77] = NAN, input.values[150] = -INFINITY;
      const auto message = dithered(wire, input.values, dither);
      EXPECT_EQ(message, reference_message(wire, input.values, DType::f32, &dither)) << input.name;
    }
  }
}

/// Largest |mean - value| / (step of one code) over the values of a message, of `draws` messages.
double bias(const Wire& wire, const std::vector<float>& values, int draws, bool dithers) {
  std::vector<double> sums(values.size());
  for (int draw = 0; draw < draws; ++draw) {
    const Dither dither{3, uint64_t(draw)};
    const auto message =
        dithers ? dithered(wire, values, dither) : reference_message(wire, values, DType::f32);
    const auto decoded = decoded_of(wire, message, values.size());
    for (size_t i = 0; i < values.size(); ++i) sums[i] += double(decoded[i]);
  }
  double worst = 0, largest = 0;
  for (const float x : values) largest = std::max(largest, double(std::fabs(x)));
  for (size_t i = 0; i < values.size(); ++i) {
    worst = std::max(worst, std::fabs(sums[i] / draws - double(values[i])));
  }
  return worst / (2 * wire.error_bound() * largest);
}

TEST_P(Dithering, MeanOverSeedsIsTheValue) {
  if (wire.hadamard) return;  // its bound is no step
  const std::vector<float> values = uniform_values(60, wire.group);
  // The standard deviation of a mean of n is at most 1 / (2 sqrt n) steps; 5 of them.
  const int draws = 2000;
  const double deviation = 0.5 / std::sqrt(double(draws));
  EXPECT_LE(bias(wire, values, draws, true), 5 * deviation);
  EXPECT_GE(bias(wire, values, 1, false), 5 * deviation) << "control: rounding to nearest";
}

TEST_P(Dithering, ErrorIsAtMostOneStep) {
  for (const Input& input : finite_inputs(1000)) {
    if (input.name == "largest" || input.name == "both ends") continue;
    if (wire.scale == ScaleKind::log2 && input.name == "any exponent") continue;
    const auto decoded = decoded_of(wire, dithered(wire, input.values, {5, 6}), 1000);
    const double floor = wire.scale == ScaleKind::log2 ? 0x1p-43 : 0x1p-125;
    for (size_t i = 0; i < 1000; ++i) {
      const size_t first = i / size_t(wire.group) * size_t(wire.group);
      double largest = 0;
      for (size_t k = first; k < std::min<size_t>(1000, first + size_t(wire.group)); ++k) {
        largest = std::max(largest, double(std::fabs(input.values[k])));
      }
      const double error = std::fabs(double(decoded[i]) - double(input.values[i]));
      ASSERT_LE(error, 2 * wire.error_bound() * largest + floor * (wire.hadamard ? wire.group : 1))
          << input.name << ", element " << i;
    }
  }
}

TEST_P(Dithering, SeedAndStreamDecideTheBytes) {
  const std::vector<float> values = uniform_values(61, 3000);
  const auto message = dithered(wire, values, {1, 2});
  EXPECT_EQ(message, dithered(wire, values, {1, 2}));
  EXPECT_NE(message, dithered(wire, values, {2, 2}));
  EXPECT_NE(message, dithered(wire, values, {1, 3}));
}

TEST(Dither, IntegersAndZerosAreKept) {
  std::vector<float> values(128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(int(i) % 15 - 7);
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Wire wire = Wire::parse("int4");
    EXPECT_EQ(decoded_of(wire, dithered(wire, values, {seed, 0}), values.size()), values);
  }
}

TEST(Dither, ErrorsOfTwoStreamsAreIndependent) {
  const Wire wire = Wire::parse("int3:f32");
  const std::vector<float> values = uniform_values(62, 1 << 16);
  const auto a = decoded_of(wire, dithered(wire, values, {1, 0}), values.size());
  const auto b = decoded_of(wire, dithered(wire, values, {1, 1}), values.size());
  double product = 0, square = 0, next = 0;
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const double error = double(a[i]) - double(values[i]);
    product += error * (double(b[i]) - double(values[i]));
    next += error * (double(a[i + 1]) - double(values[i + 1]));
    square += error * error;
  }
  EXPECT_LT(std::fabs(product / square), 0.02);  // 5 standard deviations
  EXPECT_LT(std::fabs(next / square), 0.02);
}

TEST(Dither, OtherCodecsDtypesAndShortMessagesAreRefused) {
  std::vector<float> values(100);
  std::vector<std::byte> message(4096);
  const Tensor x = Tensor::of(std::span(values), {100});
  const auto refusal = [&](const char* wire, const Tensor& tensor, size_t bytes) {
    return refusal_of([&] {
      codec::encode_dithered(Wire::parse(wire), tensor, {}, std::span(message).first(bytes));
    });
  };
  for (const char* wire : {"none", "e4m3", "mxfp4", "lossless", "int2:spikes", "int4:asym:log2"}) {
    EXPECT_THAT(refusal(wire, x, 4096), HasSubstr("expected int8 to int2, without spikes")) << wire;
  }
  EXPECT_THAT(refusal("int4", Tensor(values.data(), DType::bf16, {100}), 4096),
              HasSubstr("expected f32"));
  EXPECT_THAT(refusal("int4", x, 10), HasSubstr("into 10 bytes: expected at least 80"));
}

}  // namespace
}  // namespace tandem::test
