// Names and sizes of wire formats, and refused operands.
#include <gmock/gmock.h>

#include "tandem/codec.h"
#include "tandem/error.h"
#include "tests/codec/values.h"
#include "tests/error_of.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

TEST(Wire, TextRoundTrips) {
  for (const std::string& text : all_wires()) {
    const Wire wire = Wire::parse(text);
    EXPECT_EQ(wire.describe(), text);
    EXPECT_EQ(Wire::parse(wire.describe()), wire);
  }
  EXPECT_EQ(Wire::parse("int8:g128").describe(), "int8");
  EXPECT_EQ(Wire::parse("mxfp4:g32").describe(), "mxfp4");
  EXPECT_EQ(Wire::parse("lossless").describe(), "lossless");
  EXPECT_TRUE(Wire::parse("none").is_none());
}

TEST(Wire, WrongTextIsRefusedByName) {
  const auto refusal = [](const char* text) {
    return error_of<InvalidArgument>([&] { Wire::parse(text); });
  };
  EXPECT_THAT(refusal("int9"), HasSubstr("codec 'int9': expected one of none, int8"));
  EXPECT_THAT(refusal(""), HasSubstr("codec '': expected one of"));
  EXPECT_THAT(refusal("int4:g48"), HasSubstr("group 48: expected 16, 32, 64 or 128"));
  EXPECT_THAT(refusal("int4:g0"), HasSubstr("group 0"));
  EXPECT_THAT(refusal("int4:g99999999999"), HasSubstr("'g99999999999'"));
  EXPECT_THAT(refusal("int4:32"), HasSubstr("'32': expected gGROUP"));
  EXPECT_THAT(refusal("int4:"), HasSubstr("'': expected gGROUP"));
  EXPECT_THAT(refusal("mxfp4:g64"), HasSubstr("group 64: expected 32"));
  EXPECT_THAT(refusal("mxfp4:f32"), HasSubstr("powers of two"));
  EXPECT_THAT(refusal("e4m3:asym"), HasSubstr("asym: expected a codec of integers"));
  EXPECT_THAT(refusal("int4:spikes"), HasSubstr("expected int3 or int2"));
  EXPECT_THAT(refusal("int8:hadamard"), HasSubstr("expected int4, int3 or int2"));
  EXPECT_THAT(refusal("lossless:g32"), HasSubstr("lossless has no options"));
}

TEST(Wire, BytesMatchBitsPerElement) {
  const auto bits = [](const char* text) {
    return Wire::parse(text).bits_per_element(DType::bf16);
  };
  EXPECT_DOUBLE_EQ(bits("none"), 16);
  EXPECT_DOUBLE_EQ(bits("int8"), 8.125);
  EXPECT_DOUBLE_EQ(bits("int6"), 6.125);
  EXPECT_DOUBLE_EQ(bits("int4:g32"), 4.5);
  EXPECT_DOUBLE_EQ(bits("int4:g32:asym"), 5);
  EXPECT_DOUBLE_EQ(bits("int4:g32:log2"), 4.25);
  EXPECT_DOUBLE_EQ(bits("int3"), 3.125);
  EXPECT_DOUBLE_EQ(bits("int2:g64:spikes"), 3);
  EXPECT_DOUBLE_EQ(bits("mxfp4"), 4.25);
  EXPECT_NEAR(bits("lossless"), 12.08, 0.01);
  for (const std::string& text : all_wires()) {
    const Wire wire = Wire::parse(text);
    EXPECT_EQ(wire.bytes(0, DType::f32), 0) << text;
    EXPECT_LE(wire.bytes(1, DType::f32), 256) << text;
  }
}

TEST(Wire, WrongTensorsAndShortMessagesAreRefused) {
  std::vector<float> values(100);
  std::vector<int32_t> integers(100);
  std::vector<std::byte> message(4096);
  const Wire wire = Wire::parse("int4");
  const Tensor x = Tensor::of(std::span(values), {100});
  EXPECT_THAT(error_of<InvalidArgument>(
                  [&] { encode(wire, Tensor::of(std::span(integers), {100}), message); }),
              HasSubstr("codec 'int4': dtype i32: expected f32, bf16 or f16"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { encode(wire, x, std::span(message).first(10)); }),
              HasSubstr("into 10 bytes: expected at least 80"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { decode(wire, std::span(message).first(10), x); }),
              HasSubstr("10 bytes for 100 elements as int4: expected 80"));
  EXPECT_THAT(error_of<InvalidArgument>([&] { decode(wire, message, x.as_read_only()); }),
              HasSubstr("read-only"));
  const Tensor half(values.data(), DType::f16, {100});
  EXPECT_THAT(error_of<InvalidArgument>([&] { encode(Wire::parse("lossless"), half, message); }),
              HasSubstr("dtype f16: expected bf16 or f32"));
  Wire odd;
  odd.codec = Codec::int4;
  odd.group = 48;
  EXPECT_THAT(error_of<InvalidArgument>([&] { encode(odd, x, message); }), HasSubstr("group 48"));
}

}  // namespace
}  // namespace tandem::test
