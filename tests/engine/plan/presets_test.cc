// Models and GPUs that plans name, and the error bar of their answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>

#include "engine/model/published_models.h"
#include "engine/plan/fit/error_bar.h"
#include "engine/plan/layout_search.h"
#include "tandem/error.h"
#include "tests/error_of.h"

namespace tandem::plan {
namespace {

TEST(Presets, ModelsHaveTheirPublishedNumberOfParameters) {
  const std::map<std::string, double> billions{
      {"llama-2-7b", 6.74},      {"llama-2-13b", 13.02},    {"llama-2-70b", 68.98},
      {"llama-3.2-1b", 1.236},   {"llama-3.2-3b", 3.213},   {"llama-3-8b", 8.03},
      {"llama-3-70b", 70.55},    {"llama-3.1-405b", 405.9}, {"mistral-7b", 7.24},
      {"mixtral-8x7b", 46.70},   {"mixtral-8x22b", 140.6},  {"qwen2.5-7b", 7.616},
      {"qwen2.5-32b", 32.76},    {"qwen2.5-72b", 72.71},    {"qwen3-0.6b", .596},
      {"qwen3-1.7b", 1.721},     {"qwen3-4b", 4.022},       {"qwen3-8b", 8.191},
      {"qwen3-14b", 14.77},      {"qwen3-32b", 32.76},      {"qwen3-30b-a3b", 30.53},
      {"qwen3-235b-a22b", 235.1}};
  ASSERT_EQ(published_models().size(), billions.size());
  for (const std::string& name : published_models()) {
    const auto model = find_published_model(name);
    ASSERT_TRUE(model && billions.contains(name)) << name;
    EXPECT_NEAR(double(model->parameters()) / 1e9 / billions.at(name), 1, .005) << name;
  }
  EXPECT_FALSE(find_published_model(""));
  EXPECT_FALSE(find_published_model("llama"));
}

TEST(Presets, ModelsWithLatentAttentionAreRefusedByName) {
  for (const char* name : {"deepseek-v2-lite", "deepseek-v3"}) {
    const std::string error =
        tandem::error_of<Unsupported>([&] { static_cast<void>(find_published_model(name)); });
    EXPECT_EQ(error.find(name + std::string(": expected a model without multi-head latent")), 0u)
        << error;
  }
}

TEST(Presets, BenchmarksTimeKnownModels) {
  for (const std::string& name : benchmark_models()) {
    const ModelConfig model = published_config("test", name, 2);
    EXPECT_EQ(model.layers, 2);
    EXPECT_EQ(model.hidden, find_published_model(name)->hidden);
  }
  EXPECT_THROW(published_config("test", "llama-1b", 17), InvalidArgument);
  EXPECT_THROW(published_config("test", "llama", 0), InvalidArgument);
}

TEST(Presets, GpusAreFoundByNameInAnyCase) {
  const std::vector<std::string> names = gpu_presets();
  EXPECT_GE(names.size(), 10u);
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
  for (const std::string& name : names) {
    const auto gpu = find_gpu_preset(name);
    ASSERT_TRUE(gpu) << name;
    EXPECT_EQ(find_gpu_preset(gpu->name)->name, gpu->name);
    EXPECT_EQ(find_gpu(gpu->name)->name, gpu->name);
    EXPECT_GE(gpu->fp8_flops, gpu->bf16_flops) << name;
    EXPECT_GT(gpu->nvlink_rate, gpu->nic_rate) << name;
  }
  EXPECT_EQ(find_gpu("H200")->memory_bytes, 141e9);  // not the H20
  EXPECT_FALSE(find_gpu_preset("h"));
}

TEST(Presets, EveryModelHasALayoutOnALargeCluster) {
  const GpuSpec gpu = *find_gpu_preset("h200");
  for (const std::string& name : published_models()) {
    TrainConfig config;
    config.model = *find_published_model(name);
    config.train.seq = 4096;
    config.train.batch = 1024;
    const FoundLayouts found =
        LayoutSearch(config, gpu).find(1024, [](const RunRow&) { return prior_means(); });
    EXPECT_FALSE(found.fitting.empty()) << name;
  }
}

/// Runs of a group whose steps take `slowdown` of the priors' time.
void add_runs(std::vector<RunRow>& runs, const std::string& group, double slowdown) {
  for (const double hidden : {2048., 4096., 8192.}) {
    for (const double accumulation : {2., 8., 32., 64.}) {
      RunRow row;
      row.id = row.group = row.software = group;
      row.model = "GPT";
      row.gpu = "H100";
      row.precision = "bf16";
      row.layers = 32;
      row.hidden = hidden;
      row.heads = row.kv_heads = hidden / 128;
      row.head_dim = 128;
      row.ffn = 4 * hidden;
      row.vocab = 50304;
      row.seq = 4096;
      row.gpus = row.dp = 64;
      row.vpp = 1;
      row.grad_accum = accumulation;
      row.gbs = row.dp * accumulation;
      row.step_s = slowdown * step_time(work_of(row, *find_gpu("H100")), prior_means()).total;
      runs.push_back(row);
    }
  }
}

TEST(ErrorBar, IsTheErrorOfSourcesThatNoFitHasSeen) {
  std::vector<RunRow> runs;
  add_runs(runs, "one", 1);
  RunRow row = runs.front();
  row.group = row.software = "";
  EXPECT_FALSE(error_bar(runs, row));
  EXPECT_FALSE(error_bar({}, row));
  add_runs(runs, "two", 1);
  EXPECT_LT(error_bar(runs, row).value().share, .01);
  std::vector<RunRow> other(runs.begin(), runs.begin() + 12);
  add_runs(other, "slower", 1.3);
  const ErrorBar bar = error_bar(other, row).value();
  EXPECT_GT(bar.share, .15);  // of 1/1.3 and 1.3
  EXPECT_LT(bar.share, .35);
  EXPECT_EQ(bar.runs, 24u);
  EXPECT_EQ(bar.groups, 2u);
  EXPECT_EQ(bar.of, "H100 bf16");
  row.gpu = "B200";  // without runs: those of its precision
  EXPECT_EQ(error_bar(other, row).value().of, "bf16 on all GPUs");
}

TEST(ErrorBar, KeepsTheWorkOfARunsSoftware) {
  // Selective recomputation is more work in torchtitan.
  std::vector<RunRow> runs;
  for (const char* group : {"one", "two"}) {
    const size_t first = runs.size();
    add_runs(runs, group, 1);
    for (size_t i = first; i < runs.size(); ++i) {
      runs[i].software = "torchtitan";
      runs[i].recompute = "selective";
      runs[i].step_s = step_time(work_of(runs[i], *find_gpu("H100")), prior_means()).total;
    }
  }
  RunRow row = runs.front();
  row.group = row.software = "";
  EXPECT_LT(error_bar(runs, row).value().share, .01);
}

TEST(ErrorBar, HasFourOfFiveErrorsWithin) {
  for (int n = 2; n <= 30; ++n) {
    std::vector<double> errors;
    for (int i = 0; i < n; ++i) errors.push_back(double((7 * i) % 31));
    const double share = share_within(errors);
    const auto within = std::ranges::count_if(errors, [&](double e) { return e <= share; });
    const auto below = std::ranges::count_if(errors, [&](double e) { return e < share; });
    EXPECT_GE(5 * within, 4 * n) << n;
    EXPECT_LT(5 * below, 4 * n) << n;
  }
}

}  // namespace
}  // namespace tandem::plan
