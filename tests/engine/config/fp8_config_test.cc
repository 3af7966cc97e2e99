// Limits of train.dtype = "fp8" on GPUs.
#include <gtest/gtest.h>

#include "engine/config/config.h"
#include "engine/config/gpu_training.h"
#include "tandem/error.h"

namespace tandem {
namespace {

std::string check_fp8(std::vector<std::string> overrides) {
  overrides.insert(overrides.end(), {"train.dtype=fp8", "model.hidden=64"});
  try {
    check_gpu_training(load_config(TANDEM_SOURCE_DIR "/configs/gpu-tiny.toml", overrides), false);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Fp8Config, SizesOnGpusAreMultiplesOf16) {
  EXPECT_EQ(check_fp8({"model.ffn=128", "parallel.tp=2"}), "accepted");
  EXPECT_EQ(check_fp8({"model.ffn=136"}),
            "train.dtype = fp8: the model has a matrix 64 x 136 with parallel.tp = 1: expected "
            "multiples of 16 on GPUs");
  EXPECT_EQ(check_fp8({"model.ffn=96", "parallel.tp=4"}),
            "train.dtype = fp8: the model has a matrix 64 x 24 with parallel.tp = 4: expected "
            "multiples of 16 on GPUs");
  const std::vector<std::string> odd{"model.ffn=128", "train.microbatch=1", "train.seq=40"};
  EXPECT_EQ(check_fp8(odd),
            "train.dtype = fp8: a microbatch has 1 x train.seq = 40 tokens: expected a multiple of "
            "16 on GPUs");
  std::vector<std::string> in_bf16 = odd;
  in_bf16.push_back("train.fp8_weight_gradients=false");
  EXPECT_EQ(check_fp8(in_bf16), "accepted");
}

TEST(Fp8Config, CodesWithoutScalesAreForCpuRanks) {
  EXPECT_EQ(check_fp8({"train.fp8_scales=false"}),
            "train.fp8_scales is false: expected true on GPUs");
  const std::vector<std::string> in_bf16{"train.dtype=bf16", "train.fp8_scales=false"};
  try {
    check_config(load_config(TANDEM_SOURCE_DIR "/configs/tiny.toml", in_bf16));
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(),
                 "train.fp8_scales is false with train.dtype = \"bf16\": expected true, as it has "
                 "no effect");
  }
}

TEST(Fp8Config, ActivationsAreInBf16) {
  RunConfig train;
  for (const auto& [dtype, expected] : {std::pair("auto", DType::f32),
                                        {"f32", DType::f32},
                                        {"bf16", DType::bf16},
                                        {"fp8", DType::bf16}}) {
    train.dtype = dtype;
    EXPECT_EQ(train.activation_dtype(), expected) << dtype;
    EXPECT_EQ(train.is_fp8(), train.dtype == "fp8");
  }
}

}  // namespace
}  // namespace tandem
