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
                           "attention=none,mlp=mxfp4", "lossless"}) {
    EXPECT_EQ(CodecPolicy::parse(text).describe(), text);
  }
  const CodecPolicy policy = CodecPolicy::parse("mlp=int4:g32");
  EXPECT_TRUE(policy.attention.is_none());
  EXPECT_EQ(policy.mlp, Wire::parse("int4:g32"));
  EXPECT_EQ(CodecPolicy::parse("attn=int8"), CodecPolicy::parse("attention=int8"));
  EXPECT_TRUE(CodecPolicy::parse("none").is_none());
}

TEST(CodecPolicy, WrongTextIsRefusedByName) {
  EXPECT_THAT(refusal("int9"), HasSubstr("codec 'int9'"));
  EXPECT_THAT(refusal("head=int8"), HasSubstr("codec 'head=int8': expected attention=CODEC"));
  EXPECT_THAT(refusal("mlp=int8,mlp=int4"), HasSubstr("each at most once"));
  EXPECT_THAT(refusal("mlp=int8,"), HasSubstr("no error"));
  EXPECT_THAT(refusal("attn=int8,attention=int4"), HasSubstr("each at most once"));
}

TEST(CodecPolicy, WhatAModelWouldIgnoreIsRefused) {
  const auto refusal_of = [](const char* text, const ModelConfig& config, int tp) {
    try {
      CodecPolicy::parse(text).require_used(config, tp);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  ModelConfig dense, parallel, experts, shared, some;
  parallel.parallel_block = true;
  experts.experts = shared.experts = some.experts = 4;
  shared.shared_ffn = 64;
  some.moe_every = 2;
  for (const ModelConfig& config : {dense, parallel, experts, shared, some}) {
    EXPECT_EQ(refusal_of("int8", config, 2), "no error");
    EXPECT_EQ(refusal_of("none", config, 1), "no error");
    EXPECT_THAT(refusal_of("int8", config, 1), HasSubstr("codec 'int8': one tensor-parallel rank"));
  }
  EXPECT_THAT(refusal_of("mlp=int8", parallel, 2), HasSubstr("expected one codec for both"));
  EXPECT_THAT(refusal_of("mlp=int8", experts, 2), HasSubstr("expected one for attention"));
  for (const ModelConfig& config : {dense, shared, some}) {
    EXPECT_EQ(refusal_of("mlp=int8", config, 2), "no error");
  }
}

}  // namespace
}  // namespace tandem::test
