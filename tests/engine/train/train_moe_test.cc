// Training of a model with experts on every layout, resumption on others, and its metrics.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "core/system/files.h"
#include "engine/data/corpus.h"
#include "engine/train/trainer.h"
#include "known_peak.h"
#include "sample_text.h"
#include "temp_dir.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

struct Layout {
  int tp, ep, dp;
};

TrainRequest request_for(const Layout& layout, const std::string& out,
                         const std::vector<std::string>& overrides = {}) {
  TrainRequest request;
  std::vector<std::string> all{"train.seq=32"};  // half the configuration's tokens, half the time
  all.insert(all.end(), overrides.begin(), overrides.end());
  request.config = load_config(TANDEM_SOURCE_DIR "/configs/moe.toml", with_sample_text(all));
  request.config.parallel.tp = layout.tp;
  request.config.parallel.ep = layout.ep;
  request.config.parallel.dp = layout.dp;
  request.out = out;
  return request;
}

void run(const TrainRequest& given) {
  const TrainRequest request = with_known_peak(given);
  check_config(request.config);
  const Corpus corpus(request.config.data.paths, request.config.data.val_fraction);
  WorldOptions options;
  options.ranks = int(request.config.parallel.tp * request.config.parallel.dp);
  run_threads(options, [&](Communicator& comm) { train(comm, request, corpus); });
}

/// Choices of a run's routers, token by token: in the order of the whole batch, as replicas and,
/// within one, tensor-parallel ranks have contiguous parts of it.
class Choices {
 public:
  Choices(int ranks, int64_t layers) : layers_(layers), by_rank_(size_t(ranks)) {}
  void add(int rank, const Tensor& scores, const Tensor& chosen) {
    std::vector<Token>& tokens = by_rank_[size_t(rank)].emplace_back();
    const int64_t experts = scores.dim(1), k = chosen.dim(1);
    for (int64_t row = 0; row < scores.dim(0); ++row) {
      Token token;
      if (chosen.as<int32_t>()[row * k] < 0) {  // padding
        tokens.push_back({0, 1});
        continue;
      }
      for (int64_t i = 0; i < k; ++i) {
        token.experts |= uint64_t(1) << chosen.as<int32_t>()[row * k + i];
      }
      const float* const first = scores.as<float>() + row * experts;
      std::vector<float> sorted(first, first + experts);
      std::ranges::sort(sorted, std::greater());
      token.gap = double(sorted[size_t(k - 1)]) - double(sorted[size_t(k)]);
      tokens.push_back(token);
    }
  }

  struct Token {
    uint64_t experts = 0;  ///< one bit each
    double gap = 0;        ///< between the lowest chosen score and the highest one not chosen
  };
  std::vector<Token> of(size_t step, int64_t layer) const {
    std::vector<Token> all;
    for (const auto& calls : by_rank_) {
      const auto& tokens = calls.at(step * size_t(layers_) + size_t(layer));
      all.insert(all.end(), tokens.begin(), tokens.end());
    }
    return all;
  }
  int64_t layers() const { return layers_; }

 private:
  int64_t layers_;
  std::vector<std::vector<std::vector<Token>>> by_rank_;  // [rank][call: step by step, by layer]
};

/// Runs `request` and returns its routers' choices.
Choices choices_of(TrainRequest request) {
  Choices choices(int(request.config.parallel.tp * request.config.parallel.dp),
                  request.config.model.layers);
  request.routed = [&](int rank, int, const Tensor& scores, const Tensor& chosen) {
    choices.add(rank, scores, chosen);
  };
  run(request);
  return choices;
}

/// A gap that rounding in another order may close.
constexpr double kNearTie = 1e-6;

struct Flips {
  int64_t all = 0, at_near_ties = 0;
  double smallest_gap = 1;  ///< of all tokens, flipped or not
};
/// Tokens of one step whose experts differ.
Flips flips_between(const Choices& a, const Choices& b, size_t step) {
  Flips flips;
  for (int64_t layer = 0; layer < a.layers(); ++layer) {
    const auto of_a = a.of(step, layer), of_b = b.of(step, layer);
    EXPECT_EQ(of_a.size(), of_b.size());
    for (size_t i = 0; i < of_a.size(); ++i) {
      const double gap = std::min(of_a[i].gap, of_b[i].gap);
      flips.smallest_gap = std::min(flips.smallest_gap, gap);
      if (of_a[i].experts == of_b[i].experts) continue;
      ++flips.all;
      flips.at_near_ties += gap < kNearTie;
    }
  }
  return flips;
}

/// Requires losses within 1e-5 until a choice flips between two experts whose scores are less than
/// 1e-6 apart, as sums are rounded in another order. From then on these are two runs that learn
/// equally well. Returns the number of steps in which losses were held to 1e-5.
int expect_same_choices(const std::string& name, const std::vector<nlohmann::json>& a,
                        const Choices& of_a, const std::vector<nlohmann::json>& b,
                        const Choices& of_b) {
  EXPECT_EQ(a.size(), b.size());
  int64_t flips = 0, near = 0;
  int num_near = 0;
  double smallest = 1;
  for (size_t i = 0; i < a.size(); ++i) {
    const Flips now = flips_between(of_a, of_b, i);
    if (near == 0) smallest = std::min(smallest, now.smallest_gap);
    if (near == 0 && now.at_near_ties > 0) {
      std::printf("%s: in step %zu, %lld choices flip, %lld of them at a gap below 1e-6\n",
                  name.c_str(), i + 1, static_cast<long long>(now.all),
                  static_cast<long long>(now.at_near_ties));
      EXPECT_GE(i + 1, 3u) << "nothing has been rounded often enough for that";
    }
    flips += now.all;
    near += now.at_near_ties;
    num_near += near == 0;
    const double loss = b[i]["loss"].get<double>();
    EXPECT_LE(std::abs(a[i]["loss"].get<double>() - loss), (near > 0 ? 5e-3 : 1e-5) * loss)
        << name << ": step " << i + 1 << " after " << flips << " flips, " << near
        << " of them at near ties";
  }
  std::printf("%s: %lld flipped choices, %d steps within 1e-5, smallest gap in them %.1e\n",
              name.c_str(), static_cast<long long>(flips), num_near, smallest);
  return num_near;
}

/// Compares runs with known counts only: half of the sum of their differences is the min number
/// of choices that differ.
void expect_same_run(const std::string& got, const std::string& want) {
  const auto a = steps_of(got), b = steps_of(want);
  ASSERT_EQ(a.size(), b.size());
  double flips = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t layer = 0; layer < b[i]["expert_rows"].size(); ++layer) {
      for (size_t e = 0; e < b[i]["expert_rows"][layer].size(); ++e) {
        flips += std::abs(a[i]["expert_rows"][layer][e].get<double>() -
                          b[i]["expert_rows"][layer][e].get<double>()) /
                 2;
      }
    }
    const double loss = b[i]["loss"].get<double>();
    EXPECT_LE(std::abs(a[i]["loss"].get<double>() - loss), (flips > 0 ? 5e-3 : 1e-5) * loss)
        << "step " << i + 1 << " after " << flips << " flips";
  }
}

TEST(TrainMoe, FlipsAreCountedTokenByToken) {
  // Two of three experts; the second token's last two scores are almost equal.
  std::vector<float> scores{0.5f, 0.3f, 0.2f, 0.6f, 0.2f, 0.2f + 5e-8f};
  std::vector<int32_t> chosen{0, 1, 0, 2};
  const auto of = [&] {
    Choices choices(1, 1);
    choices.add(0, Tensor::of(std::span(scores), {2, 3}), Tensor::of(std::span(chosen), {2, 2}));
    return choices;
  };
  const Choices first = of();
  chosen = {1, 0, 2, 0};  // the same choice in another order
  EXPECT_EQ(flips_between(first, of(), 0).all, 0);
  EXPECT_LT(flips_between(first, of(), 0).smallest_gap, 1e-6);
  chosen = {0, 1, 0, 1};
  EXPECT_EQ(flips_between(first, of(), 0).all, 1);
  EXPECT_EQ(flips_between(first, of(), 0).at_near_ties, 1);
  chosen = {0, 2, 0, 2};  // 0.1 apart: not allowed
  EXPECT_EQ(flips_between(first, of(), 0).all, 1);
  EXPECT_EQ(flips_between(first, of(), 0).at_near_ties, 0);
}

void expect_losses_of_one_process(std::initializer_list<Layout> layouts) {
  const TempDir dir;
  write_bytes(dir / "text", sample_text());
  const std::vector<std::string> overrides{"data.paths=[\"" + dir / "text" + "\"]"};
  const Choices one = choices_of(request_for({1, 1, 1}, dir / "one", overrides));
  const auto losses = steps_of(dir / "one");
  ASSERT_EQ(losses.size(), 50u);
  EXPECT_LT(losses.back()["loss"].get<double>(), 0.75 * losses.front()["loss"].get<double>());
  int num_near = 0;
  for (const Layout& layout : layouts) {
    const std::string name = fmt::format("tp{}ep{}dp{}", layout.tp, layout.ep, layout.dp);
    const Choices choices = choices_of(request_for(layout, dir / name, overrides));
    num_near += expect_same_choices(name, steps_of(dir / name), choices, losses, one);
  }
  EXPECT_GE(num_near, 10 * int(layouts.size())) << "the comparison is worth nothing";
}
TEST(TrainMoe, FiftyLossesAgreeWithOneProcess) {
  expect_losses_of_one_process({{1, 2, 2}, {2, 2, 2}});
}
TEST(TrainMoeLong, FiftyLossesAgreeWithOneProcess) {
  expect_losses_of_one_process({{1, 4, 4}, {2, 1, 1}, {1, 2, 4}, {4, 1, 1}});
}

TEST(TrainMoe, MicrobatchesDoNotChangeTheAuxiliaryLossOfAStep) {
  const TempDir dir;
  run(request_for({1, 1, 1}, dir / "whole", {"train.steps=10", "model.aux_loss_coeff=0.1"}));
  run(request_for({1, 2, 2}, dir / "parts",
                  {"train.steps=10", "model.aux_loss_coeff=0.1", "train.microbatch=2",
                   "train.aux_loss_scope=step", "parallel.dp_bucket_mib=0.01"}));
  expect_same_run(dir / "parts", dir / "whole");
  const auto shards = steps_of(dir / "parts"), whole = steps_of(dir / "whole");
  EXPECT_NEAR(shards.back()["aux_loss"].get<double>(), whole.back()["aux_loss"].get<double>(),
              1e-6);
}

/// Layouts that resume, one after another, and the first digits of the checkpoints that are lost.
void expect_resumed(std::initializer_list<std::pair<Layout, std::string_view>> resumed) {
  const TempDir dir;
  const std::string out = dir / "run";
  const std::vector<std::string> overrides{"train.steps=30",
                                           "checkpoint.every=10",
                                           "checkpoint.keep=3",
                                           "model.shared_ffn=32",
                                           "model.router_bias_update_rate=1e-3",
                                           "model.router=sigmoid"};
  run(request_for({1, 1, 1}, dir / "one", overrides));
  run(request_for({1, 4, 4}, out, overrides));
  for (const auto& [layout, lost] : resumed) {
    for (const char digit : lost) {
      std::filesystem::remove_all(fmt::format("{}/checkpoints/step-000000{}0", out, digit));
    }
    TrainRequest request = request_for(layout, out, overrides);
    request.resume = true;
    run(request);
    expect_same_run(out, dir / "one");
  }
}
TEST(TrainMoe, AnotherLayoutResumesACheckpoint) {
  expect_resumed({{Layout{2, 2, 2}, "23"}, {Layout{1, 8, 8}, "3"}});
}
TEST(TrainMoeLong, AnotherLayoutResumesACheckpoint) {
  expect_resumed({{Layout{1, 2, 2}, "23"}, {Layout{2, 1, 2}, "3"}});
}

TEST(TrainMoe, SavingAtAnotherLayoutKeepsEveryBit) {
  const TempDir dir;
  const std::string out = dir / "run";
  run(request_for({1, 1, 1}, out, {"train.steps=3"}));
  const std::string model = read_file(out + "/checkpoints/step-00000003/model.safetensors");
  const std::string moments = read_file(out + "/checkpoints/step-00000003/optimizer.safetensors");
  TrainRequest request = request_for({2, 2, 2}, out, {"train.steps=3"});
  request.resume = true;
  run(request);
  EXPECT_EQ(read_file(out + "/checkpoints/step-00000003/model.safetensors"), model);
  EXPECT_EQ(read_file(out + "/checkpoints/step-00000003/optimizer.safetensors"), moments);
  EXPECT_EQ(read_file(out + "/final/model.safetensors"), model);
}

TEST(TrainMoe, ValidationIsTheSameOnEveryLayout) {
  const TempDir dir;
  const std::vector<std::string> overrides{"train.steps=4", "data.val_fraction=0.4",
                                           "train.validate_every=4", "train.validate_bytes=8000"};
  run(request_for({1, 1, 1}, dir / "one", overrides));
  const double one = steps_of(dir / "one").back()["validation_loss"].get<double>();
  for (const Layout& layout : {Layout{1, 2, 2}, {1, 2, 4}, {2, 2, 2}}) {
    const std::string out = dir / fmt::format("v{}{}", layout.dp, layout.tp);
    run(request_for(layout, out, overrides));
    EXPECT_NEAR(steps_of(out).back()["validation_loss"].get<double>(), one, 1e-5 * one);
  }
}

TEST(TrainMoe, TwoRunsAreBitwiseEqual) {
  const TempDir dir;
  for (const char* name : {"a", "b"}) {
    run(request_for({2, 2, 2}, dir / name, {"train.steps=8", "train.microbatch=2"}));
  }
  EXPECT_EQ(read_file((dir / "a") + "/final/model.safetensors"),
            read_file((dir / "b") + "/final/model.safetensors"));
}

TEST(TrainMoe, RowsThatExpertsSaveDoNotChangeABit) {
  const TempDir dir;
  for (const Layout& layout : {Layout{1, 2, 2}, {2, 1, 1}}) {
    std::string weights;
    std::vector<double> sent;
    for (const std::string save : {"sorted", "rows", "recompute"}) {
      const std::string out = dir / fmt::format("{}{}", save, layout.tp);
      run(request_for(layout, out,
                      {"train.steps=3", "train.microbatch=2", "parallel.strategy=serial",
                       "model.shared_ffn=32", "train.moe_save=" + save}));
      const std::string found = final_weights(out);
      if (weights.empty()) weights = found;
      EXPECT_TRUE(found == weights) << save << " at tp " << layout.tp;
      sent.push_back(values_of(out, "expert_bytes").back());
    }
    EXPECT_EQ(sent[1], sent[0]);
    EXPECT_GT(sent[2], 1.2 * sent[0]) << "rows are sent again";
  }
}

/// Mean loss of a run's last steps.
double last_loss(const std::string& out) {
  const std::vector<double> losses = values_of(out, "loss");
  return std::accumulate(losses.end() - 10, losses.end(), 0.0) / 10;
}

TEST(TrainMoeLong, Fp8ExpertsLearnAsInF32) {
  const TempDir dir;
  const auto loss = [&](const Layout& layout, const std::vector<std::string>& keys) {
    const std::string out = dir / fmt::format("{}{}{}", keys.size(), layout.tp, layout.ep);
    std::vector<std::string> all{"train.steps=64", "train.seq=16", "parallel.strategy=serial"};
    all.insert(all.end(), keys.begin(), keys.end());
    run(request_for(layout, out, all));
    return last_loss(out);
  };
  const double expected = loss({1, 1, 1}, {});
  for (const Layout& layout : {Layout{2, 1, 1}, {1, 2, 2}}) {
    EXPECT_LT(loss(layout, {"train.dtype=fp8"}), 1.005 * expected)
        << "tp " << layout.tp << " ep " << layout.ep;
  }
}

TEST(TrainMoe, GradientsInBf16LearnAsThoseInF32) {
  const TempDir dir;
  const std::vector<std::string> f32{"train.steps=30", "train.seq=16", "train.dtype=bf16"};
  std::vector<std::string> bf16 = f32;
  bf16.push_back("train.gradient_dtype=bf16");
  run(request_for({1, 2, 2}, dir / "f32", f32));
  run(request_for({1, 2, 2}, dir / "bf16", bf16));
  EXPECT_NEAR(last_loss(dir / "bf16"), last_loss(dir / "f32"), 0.005 * last_loss(dir / "f32"));
  EXPECT_FALSE(final_weights(dir / "bf16") == final_weights(dir / "f32"));
}

TEST(TrainMoe, LossFreeBalancingLevelsTheLoad) {
  const TempDir dir;
  // Mean over the last ten steps and all layers, on headers: synthetic words are so alike that all
  // tokens choose the same experts, whatever the bias.
  const auto imbalance = [&](const char* name, const std::string& rate) {
    run(request_for(
        {1, 1, 1}, dir / name,
        {"model.aux_loss_coeff=0", "model.router=sigmoid", "model.router_bias_update_rate=" + rate,
         "data.paths=" TANDEM_SOURCE_DIR "/include"}));
    const auto steps = steps_of(dir / name);
    double sum = 0;
    for (size_t i = steps.size() - 10; i < steps.size(); ++i) {
      for (const auto& layer : steps[i]["expert_imbalance"]) sum += layer.get<double>() / 20;
    }
    return sum;
  };
  const double without = imbalance("without", "0"), with = imbalance("with", "0.005");
  std::printf("imbalance %.2f without, %.2f with the bias\n", without, with);
  EXPECT_LT(with, 0.8 * without);
}

TEST(TrainMoe, ExpertParallelSizeMustDivideDataParallelSize) {
  const auto refused = [](const Layout& layout) -> std::string {
    try {
      check_config(request_for(layout, "out").config);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(refused({1, 2, 1}), "parallel.ep is 2: expected a divisor of parallel.dp = 1");
  EXPECT_EQ(refused({2, 3, 4}), "parallel.ep is 3: expected a divisor of parallel.dp = 4");
  EXPECT_EQ(refused({1, 8, 8}), "no error");
}

}  // namespace
}  // namespace tandem
