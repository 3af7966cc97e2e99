// Memory of training state: its formula, and weights that are in f32 at their owners only.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/system/files.h"
#include "engine/model/gradient_memory.h"
#include "engine/parallel/sync/outer_sync.h"
#include "engine/plan/cost/memory.h"
#include "engine/train/model_ranks.h"
#include "layouts.h"
#include "tandem/communicator.h"
#include "temp_dir.h"

namespace tandem {
namespace {

struct MemoryCase {
  int tp = 1, dp = 1, zero = 1;
  std::string dtype = "f32";
  std::string codec = "none";
  int replicas = 0, shards = 0;
};

/// Bytes a parameter of one rank's optimizer, weights and gradients. The model is deep and its
/// buckets small, so that messages and gradients that have not left yet matter little.
double measured_bytes(const MemoryCase& c, TrainConfig& config) {
  config = request_for({c.tp, c.dp}, "",
                       {"train.dtype=" + c.dtype, "parallel.codec=" + c.codec,
                        "parallel.dp_bucket_mib=0.004", "train.batch=8", "model.layers=48",
                        "parallel.zero=" + std::to_string(c.zero),
                        "parallel.replicas=" + std::to_string(c.replicas),
                        "parallel.dp_shard=" + std::to_string(c.shards)})
               .config;
  double bytes = 0;
  WorldOptions options;
  options.ranks = c.tp * c.dp;
  run_threads(options, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(config.parallel), false);
    const ModelRanks ranks(groups, config, {});
    if (world.rank() > 0) return;
    const ShardedOptimizer& optimizer = ranks.chunks.front().optimizer;
    bytes = double(optimizer.bytes()) / double(optimizer.elements());
  });
  return bytes;
}

TEST(TrainMemory, StateIsWithinTenPercentOfItsFormula) {
  for (const std::string dtype : {"f32", "bf16"}) {
    for (const int zero : {0, 1, 2}) {
      for (const int dp : {1, 2, 4, 8}) {
        for (const int tp : {1, 2}) {
          if (tp * dp > 8) continue;
          SCOPED_TRACE(testing::Message()
                       << dtype << " ZeRO-" << zero << " dp " << dp << " tp " << tp);
          TrainConfig config;
          const double bytes = measured_bytes({tp, dp, zero, dtype}, config);
          const double expected = MemoryEstimate(config).state(dp).total();
          const double optimizer = dtype == "f32" ? 8 : 12;
          EXPECT_DOUBLE_EQ(expected, (dtype == "f32" ? 4 : 2) + (zero == 2 ? 4.0 / dp : 4) +
                                         (zero == 0 ? optimizer : optimizer / dp));
          EXPECT_NEAR(bytes, expected, 0.1 * expected);
        }
      }
    }
  }
}

// f32: 4 bytes of weights, 4 of gradients and 8 of moments a parameter. ZeRO-1 halves the moments
// over two ranks. With ZeRO-2 owners have half of the sums, and a rank a window of its gradients.
TEST(TrainMemory, MetricsHaveTheStateOfTheLargestRank) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  for (const int zero : {0, 1, 2}) {
    SCOPED_TRACE(zero);
    const std::string out = dir / std::to_string(zero);
    const TrainRequest request =
        request_for({1, 2}, out,
                    {"train.steps=1", "train.dtype=f32", "parallel.dp_bucket_mib=0.004",
                     "parallel.zero=" + std::to_string(zero)});
    run_on_threads(request);
    const double window = MemoryEstimate(request.config).gradient_window_bytes() /
                          double(request.config.model.parameters());
    const double by_hand = zero == 0   ? 4.0 + 4 + 8
                           : zero == 1 ? 4.0 + 4 + 8.0 / 2
                                       : 4.0 + (window + 4.0 / 2) + 8.0 / 2;
    const auto line = nlohmann::json::parse(read_file(out + "/metrics.jsonl"));
    EXPECT_NEAR(line.at("state_bytes_per_parameter").get<double>(), by_hand, 0.01 * by_hand);
  }
}

// Rank 0 has the largest share.
TEST(TrainMemory, StateOfSeveralReplicasARankIsWithinTenPercentOfItsFormula) {
  for (const std::string dtype : {"f32", "bf16"}) {
    for (const int zero : {1, 2}) {
      for (const int dp : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message() << dtype << " ZeRO-" << zero << " dp " << dp);
        TrainConfig config;
        const double bytes = measured_bytes({1, dp, zero, dtype, "none", 4}, config);
        const double expected = MemoryEstimate(config).state(dp).total();
        const double share = dp == 1 ? 1 : 0.5;  // at dp 3, too
        EXPECT_DOUBLE_EQ(expected, (dtype == "f32" ? 4 + 8 * share : 2 + 12 * share) + 4 * share +
                                       (zero == 2 ? 0 : 4));
        EXPECT_NEAR(bytes, expected, 0.1 * expected);
      }
    }
  }
}

TEST(TrainMemory, StateOfShardGroupsIsWithinTenPercentOfItsFormula) {
  for (const std::string dtype : {"f32", "bf16"}) {
    for (const int shards : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << dtype << " of " << shards);
      TrainConfig config;
      const double bytes = measured_bytes({1, 4, 1, dtype, "none", 0, shards}, config);
      const double expected = MemoryEstimate(config).state(4).total();
      EXPECT_DOUBLE_EQ(expected, dtype == "f32" ? 8 + 8.0 / shards : 6 + 12.0 / shards);
      EXPECT_NEAR(bytes, expected, 0.1 * expected);
    }
  }
}

TEST(TrainMemory, WireFormatsOfWeightsKeepThemInF32) {
  TrainConfig config;
  const double lossless = measured_bytes({1, 2, 1, "bf16", "weights=lossless"}, config);
  EXPECT_DOUBLE_EQ(MemoryEstimate(config).state(2).total(), 6 + 4 + 8.0 / 2);
  EXPECT_NEAR(lossless, 14, 1.4);
  measured_bytes({1, 2, 1, "bf16", "gradients=int8,weights=int8"}, config);
  EXPECT_DOUBLE_EQ(MemoryEstimate(config).state(2).total(), 6 + 4 + 12.0 / 2 + 8);
}

/// Bytes of the rank with most: its state, and what learners' exchanges allocate next to it.
struct LearnerBytes {
  double state = 0, exchanges = 0;
};

LearnerBytes measure_learners(const TrainConfig& config) {
  WorldOptions options;
  options.ranks = ParallelDims(config.parallel).ranks();
  std::vector<LearnerBytes> by_rank(size_t(options.ranks));
  run_threads(options, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(config.parallel), config.model.experts > 0);
    ModelRanks ranks(groups, config, {});
    const OuterSync sync(*groups.sync(), config.parallel.sync, ranks.outer_stages(config.optimizer),
                         0);
    LearnerBytes& bytes = by_rank[size_t(world.rank())];
    for (const ModelChunk& chunk : ranks.chunks) {
      bytes.state += double(chunk.optimizer.state_bytes());
    }
    bytes.exchanges = double(sync.bytes());
  });
  LearnerBytes largest;
  for (const LearnerBytes& bytes : by_rank) {
    largest = {std::max(largest.state, bytes.state), std::max(largest.exchanges, bytes.exchanges)};
  }
  return largest;
}

struct LearnerLayout {
  std::string config = "tiny.toml";
  int tp = 1, inner_dp = 1;
  std::vector<std::string> keys = {};
};

// One bucket is the whole model: an owner has all of one fragment and nothing of another.
const LearnerLayout kLearnerLayouts[] = {
    {},
    {.inner_dp = 2},
    {.inner_dp = 3, .keys = {"parallel.dp_bucket_mib=0.02", "train.batch=12"}},
    {.tp = 2, .inner_dp = 2},
    {.config = "moe.toml", .inner_dp = 2, .keys = {"parallel.ep=2"}},
    {.config = "moe.toml", .inner_dp = 4, .keys = {"parallel.ep=2", "train.batch=16"}},
};

LearnerBytes expected_bytes(const LearnerLayout& layout, const std::vector<std::string>& sync,
                            TrainConfig& config) {
  std::vector<std::string> keys{"sync.method=local", "sync.learners=2", "model.vocab=320",
                                "model.ffn=192"};
  keys.insert(keys.end(), layout.keys.begin(), layout.keys.end());
  keys.insert(keys.end(), sync.begin(), sync.end());
  config = request_for({layout.tp, 2 * layout.inner_dp}, "", keys, layout.config).config;
  const RankMemory memory = MemoryEstimate(config).largest_rank(false);
  return {memory.state, memory.exchanges};
}

// Each method against the formula of another one, which must not fit.
TEST(TrainMemory, ExchangesOfLearnersAreWithinTenPercentOfTheirFormula) {
  const std::vector<std::string> dense{"sync.every=30"};
  struct Case {
    std::vector<std::string> sync, other;
  };
  const Case cases[] = {
      {dense, {"sync.every=30", "sync.codec=int4:g32"}},
      {{"sync.every=30", "sync.codec=int4:g32"}, dense},
      {{"sync.every=30", "sync.topk=0.015625"}, dense},
      {{"sync.every=30", "sync.fragments=4", "sync.delay=3"}, dense},
      {{"sync.every=30", "sync.fragments=4", "sync.delay=3", "sync.topk=0.015625"}, dense},
      {{"sync.every=30", "sync.quorum=1"}, {"sync.every=30", "sync.topk=0.015625"}},
      {{"sync.method=demo", "sync.tile=32"}, dense},
  };
  for (const LearnerLayout& layout : kLearnerLayouts) {
    for (const Case& c : cases) {
      SCOPED_TRACE(fmt::format("{} tp {} dp {} {}", layout.config, layout.tp, layout.inner_dp,
                               fmt::join(c.sync, " ")));
      TrainConfig config, other;
      const LearnerBytes expected = expected_bytes(layout, c.sync, config);
      const LearnerBytes measured = measure_learners(config);
      EXPECT_NEAR(measured.state, expected.state, 0.1 * measured.state);
      EXPECT_NEAR(measured.exchanges, expected.exchanges, 0.1 * measured.exchanges);
      const double control = expected_bytes(layout, c.other, other).exchanges;
      EXPECT_GT(std::abs(control / measured.exchanges - 1), 0.1);
    }
  }
}

// A lossless wire format keeps f32 weights on all ranks and sends these.
TEST(TrainMemory, OwnersOfTheOnlyF32WeightsGiveTheBitsOfF32WeightsOnAllRanks) {
  if (mpi_world) GTEST_SKIP() << "threads cover it";
  const TempDir dir;
  const auto final_weights = [&](const std::string& out, const std::string& codec) {
    TrainRequest request = request_for({2, 2}, out,
                                       {"train.steps=4", "train.dtype=bf16", "checkpoint.every=2",
                                        "parallel.dp_bucket_mib=0.02", "parallel.codec=" + codec});
    request.resume = true;
    run_on_threads(request);
    return read_file(out + "/final/model.safetensors");
  };
  const std::string weights = final_weights(dir / "none", "none");
  EXPECT_EQ(weights, final_weights(dir / "lossless", "weights=lossless"));
  // Checkpoints of one form are read by the other.
  const std::string step = "/checkpoints/step-00000002";
  for (const auto& [from, codec] : {std::pair("none", "weights=lossless"), {"lossless", "none"}}) {
    const std::string to = dir / "resumed-from-" + from;
    std::filesystem::create_directories(to + "/checkpoints");
    std::filesystem::copy(dir / from + step, to + step, std::filesystem::copy_options::recursive);
    EXPECT_EQ(final_weights(to, codec), weights) << codec;
  }
}

struct ZeroCase {
  std::string config;
  Layout layout;
  std::vector<std::string> keys;
};

/// File of the final weights.
std::string trained(const ZeroCase& c, const std::string& out,
                    const std::vector<std::string>& more) {
  std::vector<std::string> keys{"train.steps=3", "parallel.dp_bucket_mib=0.02"};
  keys.insert(keys.end(), c.keys.begin(), c.keys.end());
  keys.insert(keys.end(), more.begin(), more.end());
  TrainRequest request = request_for(c.layout, out, keys, c.config);
  request.resume = true;
  run_on_threads(request);
  return read_file(out + "/final/model.safetensors");
}

// One backward pass a step: the sums have the same terms.
void expect_bits_of_reducing_once(const std::vector<ZeroCase>& cases) {
  const TempDir dir;
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string out = dir / std::to_string(i);
    const std::string once = trained(cases[i], out + "-1", {});
    EXPECT_EQ(trained(cases[i], out + "-2", {"parallel.zero=2"}), once);
  }
}

const std::string kUntied = "model.tie_word_embeddings=false";
TEST(TrainMemory, ReducingEveryPassGivesTheBitsOfReducingOnce) {
  expect_bits_of_reducing_once({
      {"tiny.toml", {1, 3}, {"train.dtype=bf16", kUntied, "train.batch=6"}},
      {"tiny.toml", {2, 2}, {"train.dtype=bf16"}},
      {"tiny.toml", {1, 2}, {"parallel.codec=gradients=int8,weights=int8", "train.dtype=bf16"}},
      {"moe.toml", {2, 2}, {"parallel.ep=2", "model.layers=3", "model.moe_layer_freq=2"}},
  });
}
TEST(TrainMemoryLong, ReducingEveryPassGivesTheBitsOfReducingOnce) {
  expect_bits_of_reducing_once({
      {"tiny.toml", {1, 2}, {}},
      {"tiny.toml", {1, 4}, {"model.parallel_block=true", "model.layers=5", "train.dtype=bf16"}},
      {"tiny.toml", {1, 2}, {"parallel.codec=gradients=int4:g32"}},
      {"tiny.toml", {1, 2}, {"optimizer.name=lamb"}},
      {"tiny.toml", {1, 2}, {"parallel.pp=2", kUntied, "model.layers=4"}},
      {"moe.toml", {1, 2}, {"train.dtype=bf16", "model.router_bias_update_rate=0.01"}},
      {"moe.toml", {1, 4}, {"parallel.ep=2", "train.dtype=bf16"}},
  });
}

TEST(TrainMemoryLong, SumsOfSeveralPassesAgreeAndRepeatTheirBits) {
  const std::vector<ZeroCase> cases{
      {"tiny.toml", {1, 2}, {"train.microbatch=1"}},
      {"tiny.toml", {1, 16}, {"train.batch=32", "train.microbatch=1", "train.seq=16"}},
      {"tiny.toml", {2, 2}, {"train.microbatch=2", kUntied, "train.dtype=bf16"}},
      {"tiny.toml", {1, 2}, {"parallel.pp=2", kUntied, "train.microbatch=1", "model.layers=4"}},
      {"tiny.toml",
       {1, 2},
       {"parallel.pp=2", kUntied, "train.microbatch=1", "model.layers=4",
        "parallel.virtual_stages=2", "parallel.schedule=interleaved"}},
      {"moe.toml", {1, 4}, {"parallel.ep=2", "train.microbatch=1"}},
      {"tiny.toml", {1, 2}, {"train.microbatch=2", "parallel.codec=gradients=int4:g32"}},
  };
  const TempDir dir;
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string out = dir / std::to_string(i);
    trained(cases[i], out + "-1", {});
    const std::string every = trained(cases[i], out + "-2", {"parallel.zero=2"});
    const std::vector<double> once_losses = losses(out + "-1"), every_losses = losses(out + "-2");
    ASSERT_EQ(every_losses.size(), 3);
    const bool rounds = cases[i].keys.back().starts_with("parallel.codec") ||
                        cases[i].keys.back() == "train.dtype=bf16";
    for (size_t step = 0; step < 3; ++step) {
      EXPECT_NEAR(every_losses[step], once_losses[step], rounds ? 1e-3 : 2e-6) << step;
    }
    trained(cases[i], out + "-3", {"parallel.zero=2", "checkpoint.every=1"});
    std::filesystem::remove_all(out + "-3/final");
    std::filesystem::remove_all(out + "-3/checkpoints/step-00000003");
    EXPECT_EQ(trained(cases[i], out + "-3", {"parallel.zero=2", "checkpoint.every=1"}), every);
  }
}

// Biases of routers have no gradients: memory that held weights or other gradients must not count.
TEST(TrainMemory, ResumedRunsHaveTheBitsOfRunsWithoutAStop) {
  const TempDir dir;
  const ZeroCase c{
      "moe.toml",
      {1, 2},
      {"train.dtype=bf16", "model.router_bias_update_rate=0.01", "checkpoint.every=2"}};
  const std::string whole = trained(c, dir / "run", {});
  std::filesystem::remove_all(dir / "run/final");
  std::filesystem::remove_all(dir / "run/checkpoints/step-00000003");
  EXPECT_EQ(trained(c, dir / "run", {}), whole);
}

/// Writes units in order; memory that a unit takes must be of buckets that are complete.
void check_placement(const std::vector<int64_t>& sizes, int64_t bucket) {
  std::vector<GradientUnit> units;
  int64_t end = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  for (const int64_t size : sizes) units.push_back({.range = {end -= size, size}});
  const int64_t begin = 7, room = assign_units(units, bucket, begin);
  int64_t largest_sum = 0;  // of three units and a bucket
  for (size_t i = 0; i < units.size(); ++i) {
    const GradientUnit& unit = units[i];
    EXPECT_GE(unit.position, begin);
    EXPECT_LE(unit.position + unit.range.count, begin + room);
    int64_t sum = bucket;
    for (size_t j = 0; j < i; ++j) {
      const GradientUnit& other = units[j];
      if (j + 3 > i) sum += other.range.count;
      const bool overlaps = other.position < unit.position + unit.range.count &&
                            unit.position < other.position + other.range.count;
      if (!overlaps) continue;
      EXPECT_GE(other.range.begin, unit.sent_from);
      // Its first element's bucket ends at most `bucket` elements before, all of finished units.
      EXPECT_GE(other.range.begin - bucket, units[i - 1].range.begin);
    }
    largest_sum = std::max(largest_sum, sum + unit.range.count);
  }
  EXPECT_LE(room, 4 * largest_sum);
}

TEST(GradientWindow, UnitsShareMemoryOnlyOfCompleteBuckets) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<int64_t> sizes(1 + random() % 40);
    const int64_t layer = 1 + int64_t(random() % 100);
    for (int64_t& size : sizes) size = random() % 4 == 0 ? 1 + int64_t(random() % 300) : layer;
    check_placement(sizes, 1 + int64_t(random() % 200));
  }
  std::vector<GradientUnit> layers;
  for (int64_t i = 100; i-- > 0;) layers.push_back({.range = {i * 50, 50}});
  EXPECT_LE(assign_units(layers, 50, 0), 4 * 50);
}

}  // namespace
}  // namespace tandem
