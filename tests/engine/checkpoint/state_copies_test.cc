// Copies of the optimizer state, on all ranks (ZeRO-0) or in groups of them (HSDP): the bits of
// state that all ranks divide, and checkpoints of each continue as the other.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/system/files.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

struct CopiesCase {
  std::string config;
  Layout layout;
  std::vector<std::string> keys;
  std::string copies;  ///< key that gives the run copies of the state
};

/// File of the final weights.
std::string trained(const CopiesCase& c, const std::string& out, bool has_copies) {
  std::vector<std::string> keys{"train.steps=4", "checkpoint.every=2",
                                "parallel.dp_bucket_mib=0.02", "train.seq=16"};
  keys.insert(keys.end(), c.keys.begin(), c.keys.end());
  if (has_copies) keys.push_back(c.copies);
  TrainRequest request = request_for(c.layout, out, keys, c.config);
  request.resume = true;
  run_on_threads(request);
  return read_file(out + "/final/model.safetensors");
}

std::string optimizer_of(const std::string& out) {
  return read_file(out + "/checkpoints/step-00000004/optimizer.safetensors");
}

void check_case(const CopiesCase& c) {
  const TempDir dir;
  const std::string divided = trained(c, dir / "divided", false);
  EXPECT_TRUE(trained(c, dir / "copies", true) == divided);
  EXPECT_EQ(model_metrics(dir / "copies"), model_metrics(dir / "divided"));
  EXPECT_TRUE(optimizer_of(dir / "copies") == optimizer_of(dir / "divided"));
  for (const bool has_copies : {true, false}) {
    const std::string from = dir / (has_copies ? "divided" : "copies"), to = from + "-resumed";
    const std::string step = "/checkpoints/step-00000002";
    std::filesystem::create_directories(to + "/checkpoints");
    std::filesystem::copy(from + step, to + step, std::filesystem::copy_options::recursive);
    EXPECT_TRUE(trained(c, to, has_copies) == divided);
    EXPECT_TRUE(optimizer_of(to) == optimizer_of(dir / "divided"));
  }
}

void check_cases(std::span<const CopiesCase> cases) {
  for (const CopiesCase& c : cases) {
    SCOPED_TRACE(fmt::format("{} tp {} dp {} {} {}", c.config, c.layout.tp, c.layout.dp,
                             fmt::join(c.keys, " "), c.copies));
    check_case(c);
  }
}

const std::string kZero = "parallel.zero=0", kPairs = "parallel.dp_shard=2",
                  kUntied = "model.tie_word_embeddings=false", kBf16 = "train.dtype=bf16",
                  kValidate = "train.validate_every=2", kHeldOut = "data.val_fraction=0.3";

TEST(StateCopies, HaveTheBitsOfDividedState) {
  const std::vector<CopiesCase> cases{
      {"tiny.toml", {1, 3}, {kBf16, kUntied, "train.batch=6"}, kZero},
      {"moe.toml", {1, 4}, {"parallel.ep=2", "model.router_bias_update_rate=0.01"}, kPairs},
  };
  check_cases(cases);
}

TEST(StateCopiesLong, HaveTheBitsOfDividedState) {
  const std::vector<std::string> stages{"parallel.pp=2", "train.microbatch=1"},
      split{"parallel.pp=2", "train.microbatch=1", "parallel.schedule=zb-h1"};
  const std::vector<CopiesCase> cases{
      {"moe.toml", {1, 4}, {"parallel.ep=2", kBf16}, kZero},
      {"tiny.toml", {1, 6}, {"train.batch=6", "train.microbatch=1", kValidate, kHeldOut}, kPairs},
      {"tiny.toml", {1, 2}, {"parallel.codec=gradients=int4:g32"}, kZero},
      {"tiny.toml", {2, 2}, {kBf16, "optimizer.lr_scale=*embed_tokens*=0.5"}, kZero},
      {"tiny.toml", {1, 2}, split, kZero},
      {"tiny.toml", {1, 4}, {"train.microbatch=1"}, "parallel.dp_shard=1"},
      {"tiny.toml", {2, 4}, {kBf16}, kPairs},
      {"tiny.toml", {1, 6}, {"train.batch=6", kUntied, kBf16}, "parallel.dp_shard=3"},
      {"tiny.toml", {1, 8}, {}, "parallel.dp_shard=4"},
      {"tiny.toml", {1, 4}, stages, kPairs},
      {"tiny.toml", {1, 4}, split, kPairs},
      {"moe.toml", {1, 4}, {kBf16}, kPairs},
      {"moe.toml", {2, 4}, {"parallel.ep=2"}, kPairs},
  };
  check_cases(cases);
}

}  // namespace
}  // namespace tandem
