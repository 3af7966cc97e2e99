// Round trips of many random and adversarial values through every format: 2^16 each, or
// TANDEM_TEST_VALUES (docs/reference/wire-formats.md).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/codec/round_trip.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

constexpr int64_t kMessage = 1 << 16;

int64_t values_a_format() {
  const char* text = std::getenv("TANDEM_TEST_VALUES");
  return text ? std::max<int64_t>(1, std::strtoll(text, nullptr, 10)) : kMessage;
}

/// SplitMix64: a generator fast enough for 10^8 values.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

 private:
  uint64_t state_;
};

/// Largest exponent of a group's values.
int last_exponent(const Wire& wire) {
  return wire.scale == ScaleKind::log2 ? 145 : 254;  // below 2^19
}

float with_exponent(uint64_t bits, int exponent) {
  return std::bit_cast<float>(uint32_t(bits & 0x807fffff) | uint32_t(exponent) << 23);
}

/// 16 values, the smallest group size: one kind of difficulty each; larger groups mix several
/// kinds.
void fill(Random& random, const Wire& wire, float* values) {
  const int last = last_exponent(wire);
  const uint64_t draw = random.next();
  const int base = int(draw >> 8) % (last + 1);
  const auto near = [&](float x) {  // up to three ulps away
    const auto bits = int64_t(std::bit_cast<uint32_t>(x)) + int64_t(random.next() % 7) - 3;
    const float moved = std::bit_cast<float>(uint32_t(std::max<int64_t>(bits, 0)));
    return random.next() % 2 ? moved : -moved;
  };
  const auto scale_to = [&](float x) { return std::ldexp(x, base - 140); };
  for (int i = 0; i < 16; ++i) {
    const uint64_t bits = random.next();
    switch (draw % 8) {
      case 0:  // arbitrary bits
        values[i] = with_exponent(bits, int(bits >> 40) % (last + 1));
        break;
      case 1:  // one magnitude
        values[i] = with_exponent(bits, base);
        break;
      case 2:  // falling off over 16 powers of two
        values[i] = with_exponent(bits, std::max(0, base - i));
        break;
      case 3:  // at and next to midpoints between 8-bit codes, with the largest code present
        values[i] = near(scale_to(i == 0 ? 127.0f : float(bits % 127) + 0.5f));
        break;
      case 4:  // midpoints between codes of 4 bits and fewer
        values[i] = near(scale_to(i == 0 ? 7.0f : float(bits % 14) / 2));
        break;
      case 5:  // one large value among small ones
        values[i] = with_exponent(bits, i == int(draw >> 40) % 16 ? last : base / 2);
        break;
      case 6:  // powers of two and their neighbours
        values[i] = near(with_exponent(0, int(bits % uint64_t(last)) + 1));
        break;
      case 7:  // equal except for the sign
        values[i] = with_exponent((draw >> 32 & 0x7fffff) | (bits & 0x80000000), base);
        break;
    }
    const float maximum = wire.scale == ScaleKind::log2 ? 0x1.fp18f : 0x1.fep127f;
    values[i] = std::isnan(values[i]) ? maximum : std::clamp(values[i], -maximum, maximum);
  }
}

class ManyValues : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ManyValues, testing::ValuesIn(all_wires()), [](const auto& instance) {
  std::string name = instance.param;
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
});

/// Largest error relative to its bound.
template <typename T>
double within_the_bound(const Wire& wire, const std::vector<float>& values, int64_t at) {
  const auto narrow = as<T>(values);
  const double ratio = worst(wire, narrow, round_trip(wire, narrow));
  EXPECT_LE(ratio, 1) << wire.describe() << ", values from " << at << " of "
                      << name_of(dtype_of<T>());
  return ratio;
}

TEST_P(ManyValues, AreWithinTheBound) {
  const Wire wire = Wire::parse(GetParam());
  Random random(1);
  std::vector<float> values(static_cast<size_t>(kMessage));
  int64_t message = 0;
  double maximum = 0;
  for (int64_t at = 0; at < values_a_format(); at += kMessage, ++message) {
    for (size_t i = 0; i < values.size(); i += 16) fill(random, wire, values.data() + i);
    // Every third and fourth message is tested in a narrower dtype.
    if (message % 4 == 2) {
      maximum = std::max(maximum, within_the_bound<BFloat16>(wire, values, at));
    } else if (message % 4 == 3) {
      maximum = std::max(maximum, within_the_bound<Float16>(wire, values, at));
    } else {
      maximum = std::max(maximum, within_the_bound<float>(wire, values, at));
    }
    if (HasFailure()) return;
  }
  RecordProperty("values", std::to_string(message * kMessage));
  RecordProperty("worst_error_over_bound", fmt::format("{:.4f}", maximum));
}

TEST(ManyValues, LosslessKeepsEveryBit) {
  const Wire wire = Wire::parse("lossless");
  Random random(2);
  std::vector<uint32_t> bits(static_cast<size_t>(kMessage)), got(bits.size());
  std::vector<std::byte> message(wire.bytes(kMessage, DType::f32));
  for (int64_t at = 0; at < values_a_format(); at += kMessage) {
    const auto spread = int(random.next() % 9);  // from one exponent to all of them, NaN included
    const uint64_t base = random.next();
    for (uint32_t& one : bits) {
      const uint64_t x = random.next();
      const auto exponent = uint32_t(base + (x >> 40) % (uint64_t(1) << spread)) & 0xff;
      one = uint32_t(x & 0x807fffff) | exponent << 23;
    }
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const int64_t count = kMessage * 4 / int64_t(size_of(dtype));
      message.resize(wire.bytes(count, dtype));
      const size_t used = encode(wire, Tensor(bits.data(), dtype, {count}), message);
      decode(wire, std::span(message).first(used), Tensor(got.data(), dtype, {count}));
      ASSERT_EQ(bits, got) << "values from " << at << " as " << name_of(dtype);
    }
  }
}

}  // namespace
}  // namespace tandem::test
