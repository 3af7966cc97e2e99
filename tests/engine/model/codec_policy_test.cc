#include <gmock/gmock.h>

#include "engine/model/codec_policy.h"
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

TEST(CodecPolicy, TextRoundTrips) {
  for (const char* text :
       {"none", "int8", "int4:g32:asym", "attention=int8,mlp=int4:g32", "attention=none,mlp=mxfp4",
        "lossless", "gradients=int4:g32", "attention=int8,mlp=int8,weights=lossless",
        "attention=none,mlp=int8,gradients=lossless,weights=int8", "experts=int8",
        "embeddings=int4:g32", "attention=int8,mlp=int8,experts=int4,embeddings=lossless",
        "keys=int8:g64", "stages=int8,keys=int4:g32",
        "experts=int6,embeddings=mxfp8,gradients=int4,weights=lossless"}) {
    EXPECT_EQ(CodecPolicy::parse(text).describe(), text);
  }
  const CodecPolicy policy = CodecPolicy::parse("mlp=int4:g32");
  EXPECT_TRUE(policy.attention.is_none());
  EXPECT_EQ(policy.mlp, Wire::parse("int4:g32"));
  EXPECT_EQ(CodecPolicy::parse("attn=int8"), CodecPolicy::parse("attention=int8"));
  EXPECT_TRUE(CodecPolicy::parse("none").is_none());
  EXPECT_TRUE(CodecPolicy::parse("int4").gradients.is_none()) << "of the forward pass alone";
  EXPECT_TRUE(CodecPolicy::parse("int4").embeddings.is_none()) << "of its sums alone";
  EXPECT_EQ(CodecPolicy::parse("experts=int4").experts, Wire::parse("int4"));
  EXPECT_EQ(CodecPolicy::parse("embeddings=int5").embeddings, Wire::parse("int5"));
  const CodecPolicy trained = CodecPolicy::parse("gradients=int4,weights=lossless");
  EXPECT_EQ(trained.gradients, Wire::parse("int4"));
  EXPECT_EQ(trained.weights, Wire::parse("lossless"));
  EXPECT_TRUE(trained.mlp.is_none());
  EXPECT_FALSE(trained.is_none());
}

TEST(CodecPolicy, WrongTextIsRefusedByName) {
  EXPECT_THAT(refusal("int9"), HasSubstr("codec 'int9'"));
  EXPECT_THAT(refusal("head=int8"), HasSubstr("codec 'head=int8': expected attention=CODEC"));
  EXPECT_THAT(refusal("mlp=int8,mlp=int4"), HasSubstr("each at most once"));
  EXPECT_THAT(refusal("mlp=int8,"), HasSubstr("no error"));
  EXPECT_THAT(refusal("attn=int8,attention=int4"), HasSubstr("each at most once"));
}

TEST(CodecPolicy, CodecsAModelWouldIgnoreAreRefused) {
  const auto refusal_of = [](const char* text, const ModelConfig& config, int tp, int dp = 0,
                             int ep = 1, int pp = 1, int cp = 1) {
    try {
      CodecPolicy::parse(text).require_used(config, tp, dp, ep, pp, cp);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  ModelConfig dense, parallel, experts, shared, some;
  parallel.parallel_block = true;
  experts.experts = shared.experts = some.experts = 4;
  shared.shared_ffn = 64;
  some.moe_layer_freq = 2;
  for (const ModelConfig& config : {dense, parallel, experts, shared, some}) {
    EXPECT_EQ(refusal_of("int8", config, 2), "no error");
    EXPECT_EQ(refusal_of("none", config, 1), "no error");
    EXPECT_THAT(refusal_of("int8", config, 1), HasSubstr("codec 'int8': one tensor-parallel rank"));
  }
  for (const char* text : {"gradients=int4", "weights=int8"}) {
    EXPECT_EQ(refusal_of(text, dense, 1, 2), "no error");
    EXPECT_THAT(refusal_of(text, dense, 2, 1), HasSubstr("one data-parallel rank"));
    EXPECT_THAT(refusal_of(text, dense, 2), HasSubstr("are of training"));
  }
  EXPECT_EQ(refusal_of("mlp=int8,gradients=int4", dense, 2, 2), "no error");
  EXPECT_EQ(refusal_of("stages=int8", dense, 1, 1, 1, 2), "no error");
  EXPECT_THAT(refusal_of("stages=int8", dense, 1, 1), HasSubstr("one pipeline stage"));
  ModelConfig heads = dense;
  heads.head_dim = 64;
  EXPECT_EQ(refusal_of("keys=int8:g64", heads, 1, 1, 1, 1, 2), "no error");
  EXPECT_THAT(refusal_of("keys=int8:g64", heads, 1, 1), HasSubstr("one context-parallel rank"));
  EXPECT_THAT(refusal_of("keys=int8:g64", heads, 1), HasSubstr("keys are of training"));
  EXPECT_THAT(refusal_of("keys=int8", heads, 1, 1, 1, 1, 2),
              HasSubstr("keys=int8: expected groups that divide head_dim 64, not 128 elements"));
  EXPECT_THAT(refusal_of("keys=lossless", heads, 1, 1, 1, 1, 2), HasSubstr("a format with groups"));
  EXPECT_THAT(refusal_of("stages=int8", dense, 2), HasSubstr("stages are of training"));
  EXPECT_THAT(refusal_of("mlp=int8,gradients=int4", dense, 1, 2), HasSubstr("codec 'attention="));
  EXPECT_THAT(refusal_of("mlp=int8", parallel, 2), HasSubstr("expected one codec for both"));
  EXPECT_THAT(refusal_of("mlp=int8", experts, 2), HasSubstr("expected experts=CODEC, or one for"));
  EXPECT_THAT(refusal_of("experts=int8", dense, 2), HasSubstr("the model has no experts"));
  EXPECT_THAT(refusal_of("experts=int8", experts, 1, 2), HasSubstr("one rank has all experts"));
  EXPECT_EQ(refusal_of("experts=int8", experts, 2), "no error");
  EXPECT_EQ(refusal_of("experts=int8", some, 1, 2, 2), "no error");
  EXPECT_EQ(refusal_of("experts=int8,embeddings=int4", experts, 2), "no error");
  EXPECT_EQ(refusal_of("embeddings=int8", parallel, 2), "no error");
  EXPECT_THAT(refusal_of("embeddings=int8", dense, 1),
              HasSubstr("codec 'embeddings=int8': one tensor-parallel rank"));
  for (const ModelConfig& config : {dense, shared, some}) {
    EXPECT_EQ(refusal_of("mlp=int8", config, 2), "no error");
  }
}

}  // namespace
}  // namespace tandem::test
