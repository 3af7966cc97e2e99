// The search keeps to the job and the memory, ranks by predicted time, and returns jobs that the
// engine takes.
#include "engine/plan/layout_search.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "engine/plan/cost/activations.h"
#include "engine/plan/cost/rank_state.h"
#include "engine/plan/cost/step_work.h"
#include "overlap/attention/form.h"
#include "schedule/pipeline_simulation.h"
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
  return prior_means();
}

TEST(LayoutSearch, LayoutsDivideTheJobAndFit) {
  const GpuSpec gpu = *find_gpu("H100");
  const FoundLayouts search = LayoutSearch(make_config(), gpu).find(64, priors);
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
  const FoundLayouts search = LayoutSearch(make_config(), *find_gpu("H100")).find(64, priors);
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
  const TrainConfig base = make_config();
  const GpuSpec gpu = *find_gpu("H100");
  const LayoutSearch search(base, gpu);
  const TrainConfig config = search.config_in(search.find(64, priors).fitting.front());
  EXPECT_EQ(config.parallel.tp * config.parallel.pp * config.parallel.dp, 64);
  EXPECT_EQ(config.train.batch, 512);
}

TEST(LayoutSearch, ContextParallelLayoutsDivideSequences) {
  TrainConfig config = make_config();
  config.model.max_seq = config.train.seq = 131072;
  config.train.batch = 16;
  const GpuSpec gpu = *find_gpu("H100");
  const LayoutSearch search(config, gpu);
  for (const RunRow& row : search.rows(64)) EXPECT_EQ(row.cp, 1);
  const FoundLayouts found = search.find(64, priors, {.max_cp = 8});
  std::map<double, size_t> layouts;
  for (const Layout& layout : found.fitting) {
    const RunRow& row = layout.row;
    ++layouts[row.cp];
    EXPECT_EQ(row.tp * row.cp * row.pp * row.dp, 64);
    EXPECT_EQ(row.dp * row.mbs * row.grad_accum, 16);
    EXPECT_EQ(layout.time.exposed_cp > 0, row.cp > 1);
  }
  EXPECT_GT(layouts[8], 0u);
  EXPECT_EQ(layouts.rbegin()->first, 8);
  const auto with_cp =
      std::ranges::find_if(found.fitting, [](const Layout& layout) { return layout.row.cp == 8; });
  EXPECT_EQ(search.config_in(*with_cp).parallel.cp, 8);
}

// Bytes over the link of a rank and layer are those of the ring's two passes, mean of the ranks;
// its buffers are those of the operator, without the rows of queries and the kernel's scratch.
TEST(LayoutSearch, ContextExchangesAreTheRings) {
  const GpuSpec gpu = *find_gpu("H100");
  const TrainConfig config = make_config();
  int compared = 0;
  for (const RunRow& row : LayoutSearch(config, gpu).rows(8, 4)) {
    if (row.cp == 1 || row.tp * row.cp > gpu.host_gpus) continue;
    ++compared;
    const ContextShape shape{.batch = int64_t(row.mbs),
                             .seq = int64_t(row.seq),
                             .keys = int64_t(row.seq),
                             .heads = int64_t(row.heads / row.tp),
                             .kv_heads = int64_t(row.kv_heads / row.tp),
                             .head_dim = int64_t(row.head_dim),
                             .dtype = DType::bf16};
    const int ranks = int(row.cp);
    double bytes = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      for (const ContextPass pass : {ContextPass::forward, ContextPass::backward}) {
        bytes += double(kRingForm.sent_bytes(pass, {shape, ranks, rank}, 0)) / ranks;
      }
    }
    EXPECT_NEAR(work_of(row, gpu).layer.cp * gpu.nvlink_rate, bytes, 1e-9 * bytes);
    // A rank's own keys, and its gradients and their sum, are not of the other ranks.
    const double share = double(shape.seq) / ranks * double(shape.batch * shape.kv_heads * 2) *
                         double(shape.head_dim);
    const double buffers = 2 * share * (ranks * (2 + 4 + 4) + 2 + 4);
    EXPECT_NEAR(context_bytes(row) / row.vpp, buffers - 2 * share * (2 + 4), 1e-9 * buffers);
  }
  EXPECT_GT(compared, 0);
}

/// The layouts of one learner with its share of the batch, and what exchanges add.
TEST(LayoutSearch, LearnersAddTheirExchangesToTheLayoutsOfOne) {
  TrainConfig one = make_config(), four = make_config();
  one.train.batch = 128;
  four.parallel.dp = 4;
  SyncConfig& sync = four.parallel.sync;
  sync.method = "local";
  sync.learners = 4, sync.every = 32, sync.fragments = 4, sync.delay = 5;
  sync.codec = "int4:g32";
  GpuSpec gpu = *find_gpu("H200");
  gpu.learner_rate = 1e6;
  std::map<std::string, Layout> alone;
  const auto name = [](const Layout& l) {
    return fmt::format("{} {} {} {} {} {} {} {}", l.row.tp, l.row.pp, int(l.row.schedule),
                       l.row.vpp, l.row.mbs, l.row.dp, l.row.recompute, l.formats.zero);
  };
  for (const Layout& layout : LayoutSearch(one, gpu).find(64, priors).fitting) {
    alone[name(layout)] = layout;
  }
  const LayoutSearch search(four, gpu);
  const FoundLayouts found = search.find(64, priors);
  int compared = 0, hidden = 0;
  for (const Layout& layout : found.fitting) {
    if (!alone.contains(name(layout))) continue;  // another is as good with fewer bytes to exchange
    const Layout& without = alone[name(layout)];
    const LearnerExchange& exchange = layout.exchange;
    EXPECT_NEAR(layout.memory_gib * kGiB, without.memory_gib * kGiB + exchange.memory_bytes, 1e3);
    // Anchors, momenta and what was sent; a quarter of the changes, and of two rounds of messages;
    // those decoded between two norms, of an MLP, at most as many as changes.
    const RankWeights weights = rank_weights(layout.row);
    const double owned = weights.dense / layout.row.dp;
    const double message = 4.5 / 8 / 4;
    const auto mlp = double(3 * four.model.hidden * four.model.ffn);
    const double decoded = std::min(4 * mlp / double(layout.row.tp) / owned, 1.0);
    EXPECT_NEAR(exchange.memory_bytes / owned, 12 + 1 + decoded + 2 * 4 * message, 0.05);
    EXPECT_NEAR(exchange.sent_bytes / owned, 3 * message, 0.005);
    EXPECT_NEAR(exchange.step_bytes / owned, 3 * 4 * message / 32, 0.001);
    EXPECT_DOUBLE_EQ(exchange.seconds, exchange.sent_bytes / 1e6);
    const double exposed = std::max(0.0, exchange.seconds - 5 * without.time.total) * 4 / 32;
    EXPECT_NEAR(layout.time.exposed_sync, exposed, 1e-9);
    EXPECT_NEAR(layout.time.total, without.time.total + exposed, 1e-9);
    hidden += exposed == 0;
    ++compared;
  }
  EXPECT_GT(compared, 10);
  EXPECT_LT(hidden, compared);
  EXPECT_EQ(search.config_in(found.fitting.front()).parallel.dp, 4 * found.fitting.front().row.dp);
}

TEST(LayoutSearch, JobsThatRecomputeAreJobFiles) {
  const TrainConfig base = make_config();
  const GpuSpec gpu = *find_gpu("H100");
  const LayoutSearch search(base, gpu);
  int tried = 0;
  for (const Layout& layout : search.find(64, priors).fitting) {
    if (layout.row.recompute != "full") continue;
    EXPECT_EQ(search.config_in(layout).train.recompute, "full");
    ++tried;
  }
  EXPECT_GT(tried, 5);
}

TEST(LayoutSearch, ConsidersThousandsOfLayoutsOfTwelveThousandGpus) {
  TrainConfig config = make_config();
  config.train.batch = 6144;
  const LayoutLimits limits{.max_error = .1, .dp_formats = true};
  const auto considered =
      LayoutSearch(config, *find_gpu("H100")).find(12288, priors, limits).considered;
  EXPECT_GT(considered, 5000u);
  EXPECT_LT(considered, 100000u);  // else a search takes minutes
}

TEST(LayoutSearch, BubbleOfSplitSchedulesIsTheSimulated) {
  using schedule::PipelineKind;
  for (const PipelineKind kind :
       {PipelineKind::zb_h1, PipelineKind::zb_v, PipelineKind::dualpipe_v}) {
    for (const int ranks : {2, 3, 5, 8}) {
      for (const int microbatches : {2 * ranks, 2 * ranks + 1, 5 * ranks}) {
        for (const double recompute : {0.0, 1.0}) {
          const schedule::PipelineShape shape{kind, ranks, microbatches, min_chunks(kind)};
          const auto times = simulate(shape, pipeline_actions(shape), {.recompute = recompute});
          const double work = shape.chunks * (3 + recompute) * microbatches;
          const double expected = times.makespan / work - 1;
          const double idle = split_schedule(kind, ranks, recompute).idle;
          EXPECT_NEAR(idle / ((3 + recompute) * microbatches), expected, 1e-12)
              << name_of(kind) << " " << ranks << " " << microbatches << " " << recompute;
          int saved = 0;
          for (int rank = 0; rank < ranks; ++rank)
            saved = std::max(saved, peak_activations(shape, rank));
          EXPECT_EQ(split_schedule(kind, ranks, 0).saved * shape.chunks, saved) << name_of(kind);
        }
      }
    }
  }
}

/// Expects every fitting layout to have about the activations that the engine counts, at most
/// `max_ratio` times.
void expect_activations_of_engine(bool is_tied, double max_ratio) {
  TrainConfig config = make_config();
  config.train.batch = 64;
  config.model.tie_word_embeddings = is_tied;
  std::map<schedule::PipelineKind, int> found;
  const GpuSpec gpu = *find_gpu("H100");
  const LayoutSearch search(config, gpu);
  for (const Layout& layout : search.find(64, priors).fitting) {
    const RunRow& row = layout.row;
    const schedule::PipelineKind kind = pipeline_shape_of(row).kind;
    ++found[kind];
    if (splits_backward(kind)) {
      EXPECT_GE(row.microbatches(), 2 * row.pp);
      EXPECT_NE(layout.formats.zero, 2);
    }
    const TrainConfig planned = search.config_in(layout);
    double of_engine = 0;
    for (int rank = 0; rank < int(row.pp); ++rank)
      of_engine = std::max(of_engine, rank_activation_bytes(planned, rank, true));
    const double ratio = (working_bytes(row) - kGiB) / of_engine;
    EXPECT_GT(ratio, .8) << planned.parallel.schedule << " pp " << row.pp << " " << row.recompute;
    EXPECT_LT(ratio, max_ratio) << planned.parallel.schedule << " pp " << row.pp << " "
                                << row.recompute;
  }
  EXPECT_EQ(found.size(), 5u);
}

TEST(LayoutSearch, EveryScheduleHasAboutTheEnginesActivations) {
  expect_activations_of_engine(false, 1.3);
}

TEST(LayoutSearch, TiedEmbeddingsHaveAboutTheEnginesActivations) {
  expect_activations_of_engine(true, 1.4);  // zb-v: 1.36
}

TEST(LayoutSearch, TiedEmbeddingsOfManyMicrobatchesSaveAsManyAsOfFour) {
  using schedule::PipelineKind;
  for (const PipelineKind kind : schedule::pipeline_kinds()) {
    if (kind == PipelineKind::gpipe) continue;  // saves all of them, and is not searched
    for (const int ranks : {2, 3, 4, 8}) {
      schedule::PipelineShape shape{kind, ranks, 4 * ranks, schedule::min_chunks(kind)};
      const int last = shape.stages() - 1, saved = saved_microbatches(shape, last, true);
      EXPECT_GE(saved, saved_microbatches(shape, last, false)) << name_of(kind);
      for (const int times : {5, 8}) {
        shape.microbatches = times * ranks;
        EXPECT_EQ(saved_microbatches(shape, last, true), saved) << name_of(kind) << " " << ranks;
      }
    }
  }
}

TEST(LayoutSearch, SaysIfNothingDividesTheJob) {
  TrainConfig config = make_config();
  config.train.batch = 7;
  config.model.layers = 79;
  EXPECT_THROW(LayoutSearch(config, *find_gpu("H100")).find(1024, priors), InvalidArgument);
}

TEST(LayoutSearch, SlowerLinksFavourLessTensorParallelism) {
  GpuSpec slow = *find_gpu("H100");
  slow.nvlink_rate /= 10;
  const double fast_tp =
      LayoutSearch(make_config(), *find_gpu("H100")).find(64, priors).fitting.front().row.tp;
  EXPECT_LE(LayoutSearch(make_config(), slow).find(64, priors).fitting.front().row.tp, fast_tp);
}

}  // namespace
}  // namespace tandem::plan
