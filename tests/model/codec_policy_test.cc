#include <gmock/gmock.h>

#include "model/codec_policy.h"
#include "tandem/error.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

std::string refusal(const char* text) {
  try {
    CodecPolicy::parse(text);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(CodecPolicy, TextIsReadAndWritten) {
  for (const char* text : {"none", "int8", "int4:g32:asym", "attention=int8,mlp=int4:g32",
                           "attention=none,mlp=mxfp4"}) {
    EXPECT_EQ(CodecPolicy::parse(text).describe(), text);
  }
  const CodecPolicy policy = CodecPolicy::parse("mlp=int4:g32");
  EXPECT_TRUE(policy.attention.is_none());
  EXPECT_EQ(policy.mlp, Wire::parse("int4:g32"));
  EXPECT_TRUE(CodecPolicy::parse("none").is_none());
}

TEST(CodecPolicy, WrongTextIsRefusedByName) {
  EXPECT_THAT(refusal("int9"), HasSubstr("codec 'int9'"));
  EXPECT_THAT(refusal("head=int8"), HasSubstr("codec 'head=int8': expected attention=CODEC"));
  EXPECT_THAT(refusal("mlp=int8,mlp=int4"), HasSubstr("each at most once"));
  EXPECT_THAT(refusal("mlp=int8,"), HasSubstr("no error"));
  EXPECT_THAT(refusal("mlp=lossless"), HasSubstr("one size"));
}

}  // namespace
}  // namespace tandem::test
