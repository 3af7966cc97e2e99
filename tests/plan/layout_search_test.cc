// The search keeps to the job and the memory, ranks by predicted time, and returns jobs that the
// engine takes.
#include "engine/plan/layout_search.h"

#include <gtest/gtest.h>

#include <chrono>

#include "tandem/error.h"

namespace tandem::plan {
namespace {

TrainConfig make_config() {
  TrainConfig config;
  config.model.hidden = 8192;
  config.model.layers = 80;
  config.model.heads = 64;
  config.model.kv_heads = 8;
  config.model.head_dim = 128;
  config.model.ffn = 28672;
  config.model.max_seq = 4096;
  config.train.seq = 4096;
  config.train.batch = 512;
  return config;
}

Factors priors(const RunRow&) {
  Factors factors;
  for (size_t term = 0; term < kTerms; ++term) factors[term] = term_priors()[term].mean;
  return factors;
}

TEST(LayoutSearch, LayoutsDivideTheJobAndFit) {
  const GpuSpec gpu = *find_gpu("H100");
  const LayoutSearch search = search_layouts(make_config(), 64, gpu, priors);
  ASSERT_GT(search.fitting.size(), 20u);
  EXPECT_LT(search.fitting.size(), search.considered);
  double last = 0;
  for (const Layout& layout : search.fitting) {
    const RunRow& row = layout.row;
    EXPECT_EQ(row.tp * row.pp * row.dp, 64);
    EXPECT_EQ(row.dp * row.mbs * row.grad_accum, 512);
    EXPECT_LE(layout.memory_gib * kGiB, .92 * gpu.memory_bytes);
    EXPECT_GE(layout.time.total, last);
    last = layout.time.total;
  }
}

TEST(LayoutSearch, ParetoFrontIsNotBeatenAndCoversAll) {
  const LayoutSearch search = search_layouts(make_config(), 64, *find_gpu("H100"), priors);
  const auto front = pareto_front(search.fitting);
  for (const Layout& layout : search.fitting) {
    bool matched = false;
    for (const Layout& best : front) {
      matched |= best.time.total <= layout.time.total && best.memory_gib <= layout.memory_gib;
      EXPECT_FALSE(layout.time.total < best.time.total && layout.memory_gib < best.memory_gib);
    }
    EXPECT_TRUE(matched);
  }
}

TEST(LayoutSearch, JobInALayoutIsAJobFile) {
  const LayoutSearch search = search_layouts(make_config(), 64, *find_gpu("H100"), priors);
  const TrainConfig config = config_in_layout(make_config(), search.fitting.front());
  EXPECT_EQ(config.parallel.tp * config.parallel.pp * config.parallel.dp, 64);
  EXPECT_EQ(config.train.batch, 512);
}

TEST(LayoutSearch, JobsThatRecomputeAreJobFiles) {
  const LayoutSearch search = search_layouts(make_config(), 64, *find_gpu("H100"), priors);
  int tried = 0;
  for (const Layout& layout : search.fitting) {
    if (layout.row.recompute != "full") continue;
    EXPECT_EQ(config_in_layout(make_config(), layout).train.recompute, "full");
    ++tried;
  }
  EXPECT_GT(tried, 5);
}

TEST(LayoutSearch, SearchesTwelveThousandGpusInSeconds) {
  TrainConfig config = make_config();
  config.train.batch = 6144;
  const auto begin = std::chrono::steady_clock::now();
  const LayoutLimits limits{.max_error = .1, .dp_formats = true};
  EXPECT_GT(search_layouts(config, 12288, *find_gpu("H100"), priors, limits).considered, 5000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(LayoutSearch, SaysIfNothingDividesTheJob) {
  TrainConfig config = make_config();
  config.train.batch = 7;
  config.model.layers = 79;
  EXPECT_THROW(search_layouts(config, 1024, *find_gpu("H100"), priors), InvalidArgument);
}

TEST(LayoutSearch, SlowerLinksFavourLessTensorParallelism) {
  GpuSpec slow = *find_gpu("H100");
  slow.nvlink_rate /= 10;
  const double fast_tp =
      search_layouts(make_config(), 64, *find_gpu("H100"), priors).fitting.front().row.tp;
  EXPECT_LE(search_layouts(make_config(), 64, slow, priors).fitting.front().row.tp, fast_tp);
}

}  // namespace
}  // namespace tandem::plan
