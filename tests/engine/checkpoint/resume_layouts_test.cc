// A checkpoint of any layout, resumed at any other: generated pairs of layouts of a dense model and
// of one with experts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

struct AnyLayout {
  int tp, pp, dp, ep;
  std::string name() const { return fmt::format("tp {} pp {} dp {} ep {}", tp, pp, dp, ep); }
};

/// All of at most 8 ranks.
std::vector<AnyLayout> all_layouts(bool experts) {
  std::vector<AnyLayout> all;
  for (const int tp : {1, 2, 4}) {
    for (const int pp : {1, 2}) {
      for (const int dp : {1, 2, 4}) {
        for (const int ep : {1, 2, 4}) {
          const bool is_valid = ep == 1 || (experts && dp % ep == 0);
          if (tp * pp * dp <= 8 && is_valid) all.push_back({tp, pp, dp, ep});
        }
      }
    }
  }
  return all;
}

struct Pair {
  AnyLayout from, to;
  bool experts;
  std::string dtype;
};

Pair pair_of(uint64_t number) {
  const auto words = philox(41, 1, number);
  const bool experts = number % 2 == 1;
  const std::vector<AnyLayout> all = all_layouts(experts);
  const size_t from = words[0] % all.size();
  const size_t to = (from + 1 + words[1] % (all.size() - 1)) % all.size();  // another one
  return {all[from], all[to], experts, words[2] % 3 == 0 ? "bf16" : "f32"};
}

TrainRequest request(const Pair& pair, const AnyLayout& layout, const std::string& out, int steps) {
  return request_for({layout.tp, layout.dp}, out,
                     {"train.steps=" + std::to_string(steps), "checkpoint.every=1", "train.seq=16",
                      "train.batch=8", "train.microbatch=1", "train.dtype=" + pair.dtype,
                      "parallel.dp_bucket_mib=0.03", "parallel.pp=" + std::to_string(layout.pp),
                      "parallel.ep=" + std::to_string(layout.ep)},
                     pair.experts ? "moe.toml" : "tiny.toml");
}

std::string file_of(const std::string& out, const std::string& name) {
  return read_file(checkpoint_path(out, 2) + "/" + name);
}

void resume_pairs(uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    const Pair pair = pair_of(i);
    SCOPED_TRACE(fmt::format("{}: {} {}, {} to {}", i, pair.experts ? "experts" : "dense",
                             pair.dtype, pair.from.name(), pair.to.name()));
    const TempDir dir;
    const std::string from = dir / "from", to = dir / "to";
    run_on_threads(request(pair, pair.from, from, 2));
    const std::string model = file_of(from, "model.safetensors"),
                      optimizer = file_of(from, "optimizer.safetensors");
    fs::create_directories(to + "/checkpoints");
    fs::copy(checkpoint_path(from, 2), checkpoint_path(to, 2), fs::copy_options::recursive);
    fs::copy(from + "/metrics.jsonl", to);
    // The other layout saves again what it has read.
    TrainRequest again = request(pair, pair.to, to, 2);
    again.resume = true;
    fs::last_write_time(checkpoint_path(to, 2) + "/model.safetensors", fs::file_time_type::min());
    EXPECT_EQ(run_on_threads(again).step, 2);
    EXPECT_GT(fs::last_write_time(checkpoint_path(to, 2) + "/model.safetensors"),
              fs::file_time_type::clock::now() - std::chrono::hours(1));
    EXPECT_TRUE(file_of(to, "model.safetensors") == model);
    EXPECT_TRUE(file_of(to, "optimizer.safetensors") == optimizer);
    // Both continue with the same loss.
    for (const auto& [layout, out] : {std::pair(pair.from, from), std::pair(pair.to, to)}) {
      TrainRequest third = request(pair, layout, out, 3);
      third.resume = true;
      EXPECT_EQ(run_on_threads(third).step, 3);
    }
    const double expected = losses(from).back(), found = losses(to).back();
    EXPECT_LE(std::abs(found - expected), (pair.dtype == "f32" ? 1e-5 : 1e-2) * expected);
  }
}

TEST(ResumeLayouts, AnyPairHasTheSameStateAndLoss) {
  resume_pairs(0, 2);
}

TEST(ResumeLayoutsLong, AnyPairHasTheSameStateAndLoss) {
  resume_pairs(2, 60);
}

}  // namespace
}  // namespace tandem
