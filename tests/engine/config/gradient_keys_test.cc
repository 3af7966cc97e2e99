// Keys of gradients in bf16, and of the head's rows, against the others.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/config/config.h"
#include "engine/config/gpu_training.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using ::testing::HasSubstr;

using Overrides = std::vector<std::string>;

std::string check(const Overrides& overrides) {
  try {
    check_config(parse_config("[data]\npaths = \"x\"\n", "j", overrides));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(GradientKeys, Bf16IsRefusedWhereTheyWouldBeSummed) {
  const auto check = [](Overrides overrides) {
    overrides.insert(overrides.begin(), {"train.dtype=bf16", "train.gradient_dtype=bf16"});
    return tandem::check(overrides);
  };
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"parallel.dp=4", "parallel.tp=2", "train.residual_gradient=bf16"}), "accepted");
  EXPECT_EQ(check({"train.batch=8", "train.microbatch=4", "parallel.dp=2"}), "accepted");
  EXPECT_EQ(check({"model.experts=4", "parallel.dp=2", "parallel.ep=2"}), "accepted");
  EXPECT_EQ(check({"train.batch=16", "train.microbatch=4", "parallel.dp=2"}),
            "train.gradient_dtype is bf16 with 2 microbatches a step: expected f32, in which their "
            "gradients are summed, or train.microbatch = 8");
  for (const char* key : {"train.dtype=f32", "train.dtype=auto"}) {
    EXPECT_THAT(check({key}), HasSubstr("expected f32, or train.dtype = \"bf16\" or \"fp8\""));
  }
  EXPECT_EQ(check({"train.dtype=fp8", "train.residual_gradient=bf16"}), "accepted");
  EXPECT_EQ(check({"train.gradient_dtype=f32", "train.residual_gradient=bf16", "parallel.pp=2"}),
            "train.residual_gradient is bf16 with parallel.pp = 2: expected f32, in which stages "
            "send it");
  for (const auto& [key, named] :
       {std::pair("parallel.zero=0", "parallel.zero = 0"),
        std::pair("parallel.zero=2", "parallel.zero = 2"),
        std::pair("parallel.replicas=8", "parallel.replicas = 8"),
        std::pair("parallel.dp_shard=2", "parallel.dp_shard = 2"),
        std::pair("parallel.dp_host=2", "parallel.dp_host = 2"),
        std::pair("parallel.codec=gradients=int8", "parallel.codec = \"gradients=int8\""),
        std::pair("optimizer.name=lamb", "optimizer.name = \"lamb\""),
        std::pair("model.attention_sinks=true", "model.attention_sinks = true"),
        std::pair("model.qkv_bias=true", "model.qkv_bias = true")}) {
    EXPECT_EQ(check({key, "parallel.dp=4", "train.batch=16"}),
              fmt::format("train.gradient_dtype is bf16 with {}: expected f32", named));
  }
}

TEST(GradientKeys, SavedRowsOfExpertsNeedExperts) {
  EXPECT_EQ(check({"train.moe_save=recompute", "model.experts=4"}), "accepted");
  EXPECT_EQ(check({"train.moe_save=recompute"}),
            "train.moe_save is recompute with model.experts = 0: expected sorted, as it has no "
            "effect");
  EXPECT_THAT(check({"train.moe_save=none", "model.experts=4"}),
              HasSubstr("one of \"sorted\", \"rows\", \"recompute\""));
}

TEST(GradientKeys, GpusKeepExpertsGradientsInF32AndTheirRowsSorted) {
  const auto refusal = [](const char* key) -> std::string {
    try {
      const Overrides overrides{key};
      const auto config = load_config(TANDEM_SOURCE_DIR "/configs/gpu-moe.toml", overrides);
      check_config(config);
      check_gpu_training(config, false);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal("train.moe_save=rows"), "train.moe_save = rows: expected sorted on GPUs");
  EXPECT_EQ(refusal("train.gradient_dtype=bf16"),
            "train.gradient_dtype = bf16: expected f32 on GPUs where model.experts is above 0");
}

TEST(GradientKeys, HeadRowsDivideTheTokensOfAMicrobatch) {
  const Overrides settings{"train.batch=8", "train.seq=128", "train.microbatch=2"};
  const auto with = [&](std::initializer_list<const char*> more) {
    Overrides all = settings;
    all.insert(all.end(), more.begin(), more.end());
    return check(all);
  };
  EXPECT_EQ(with({"train.head_rows=256"}), "accepted");
  EXPECT_EQ(with({"train.head_rows=64", "parallel.tp=2"}), "accepted");
  for (const char* rows : {"train.head_rows=512", "train.head_rows=24"}) {
    EXPECT_THAT(with({rows}), HasSubstr("expected 0, or a divisor of the 256 tokens of a "
                                        "microbatch that is a multiple of parallel.tp = 1"));
  }
  EXPECT_THAT(with({"train.head_rows=1", "parallel.tp=2"}), HasSubstr("multiple of parallel.tp"));
  EXPECT_EQ(with({"train.head_rows=64", "parallel.pp=2", "model.tie_word_embeddings=true"}),
            "train.head_rows is 64 with model.tie_word_embeddings and parallel.pp = 2: expected 0");
}

}  // namespace
}  // namespace tandem
