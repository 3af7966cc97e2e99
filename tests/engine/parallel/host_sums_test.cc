// Gradients that are summed by host before those of hosts are (parallel.dp_host): the sums of a
// reference in the same order, the bytes that leave a host, and runs.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/system/files.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/flat.h"

namespace tandem {
namespace {

constexpr size_t kCount = 1501;
constexpr int kSteps = 3;

float gradient_of(int64_t step, int rank, size_t i) {
  return normal(7, uint64_t(step) * 64 + uint64_t(rank), i);
}

struct HostCase {
  int ranks, host;
  int64_t bucket;
  bool has_copies;  ///< hosts have copies of the state
};

/// Sums of hosts in order, each over its ranks in order.
std::vector<float> reference_sums(const HostCase& c, int64_t step) {
  std::vector<float> sums(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    for (int first = 0; first < c.ranks; first += c.host) {
      float of_host = gradient_of(step, first, i);
      for (int rank = first + 1; rank < first + c.host; ++rank) {
        of_host += gradient_of(step, rank, i);
      }
      sums[i] = first == 0 ? of_host : sums[i] + of_host;
    }
  }
  return sums;
}

AdamStep adam_of(int64_t step) {
  return AdamStep::make({}, step, 0.02, 0);
}

/// Weights after each step.
std::vector<std::vector<float>> reference_weights(const HostCase& c) {
  std::vector<float> weights(kCount), first(kCount), second(kCount);
  for (size_t i = 0; i < kCount; ++i) weights[i] = normal(7, 9999, i);
  std::vector<std::vector<float>> all;
  for (int64_t step = 0; step < kSteps; ++step) {
    std::vector<float> sums = reference_sums(c, step);
    adamw({}, adam_of(step), true, {flat(weights), flat(first), flat(second)}, flat(sums));
    all.push_back(weights);
  }
  return all;
}

void check_optimizer(const HostCase& c) {
  const std::vector<std::vector<float>> expected = reference_weights(c);
  std::atomic<uint64_t> gradients = 0, weights = 0;
  WorldOptions options;
  options.ranks = c.ranks;
  run_threads(options, [&](Communicator& comm) {
    const auto host = comm.split(comm.rank() / c.host, comm.rank() % c.host);
    const auto across = comm.split(comm.rank() % c.host, comm.rank() / c.host);
    std::vector<float> w(kCount), g(kCount);
    for (size_t i = 0; i < kCount; ++i) w[i] = normal(7, 9999, i);
    ParameterGroup group{
        comm, {0, int64_t(kCount)}, {{"a", {1, kCount}, {0, 0, 1}, 0, kCount, true}}};
    group.host = host.get();
    group.across_hosts = across.get();
    if (c.has_copies) group.shards = host.get(), group.copies = across.get();
    ShardedOptimizer optimizer({}, flat(w), flat(g), {group}, c.bucket);
    for (int64_t step = 0; step < kSteps; ++step) {
      auto reported = int64_t(kCount);
      for (size_t i = kCount; i-- > 0;) {
        g[i] = gradient_of(step, comm.rank(), i);
        if (i % 97 != 0) continue;
        optimizer.ready({int64_t(i), reported - int64_t(i)});
        reported = int64_t(i);
      }
      optimizer.reduce();
      gradients += optimizer.take_sent().gradients;  // copies are gathered, too
      const std::vector<float> sums = reference_sums(c, step);
      for (const StateSlice& slice : optimizer.reduced_gradients()) {
        for (int64_t i = 0; i < slice.values.elements(); ++i) {
          ASSERT_EQ(slice.values.as<float>()[i], sums[size_t(slice.begin + i)]) << slice.begin + i;
        }
      }
      optimizer.update(adam_of(step));
      optimizer.await_all();
      ASSERT_EQ(w, expected[size_t(step)]) << "rank " << comm.rank() << " step " << step;
      const ShardedOptimizer::Sent sent = optimizer.take_sent();
      EXPECT_EQ(sent.gradients, 0);
      weights += sent.weights;
    }
  });
  // Every gradient of a host and of other hosts is sent once, not once a rank; so is every weight,
  // or sum for a copy.
  const uint64_t array = kSteps * kCount * sizeof(float);
  const auto hosts = uint64_t(c.ranks / c.host), host = uint64_t(c.host);
  const uint64_t within_hosts = hosts * (host - 1) * array, across = (hosts - 1) * array;
  EXPECT_EQ(gradients, within_hosts + (c.has_copies ? 2 : 1) * across);
  EXPECT_EQ(weights, within_hosts + (c.has_copies ? 0 : across));
}

TEST(HostSums, MatchTheReferenceBitForBit) {
  for (const auto& [ranks, host] :
       {std::pair{4, 2}, std::pair{6, 3}, std::pair{6, 2}, std::pair{8, 4}, std::pair{8, 2}}) {
    for (const int64_t bucket : {64, 333, 5000}) {
      for (const bool has_copies : {false, true}) {
        SCOPED_TRACE(fmt::format("{} ranks, {} a host, buckets of {}, {}", ranks, host, bucket,
                                 has_copies ? "copies" : "no copies"));
        check_optimizer({ranks, host, bucket, has_copies});
      }
    }
  }
}

/// File of the final weights.
std::string trained(const std::string& config, Layout layout, const std::string& out,
                    std::vector<std::string> keys) {
  keys.insert(keys.begin(), {"train.steps=4", "checkpoint.every=2", "parallel.dp_bucket_mib=0.02",
                             "train.seq=16", "parallel.dp_host=2"});
  TrainRequest request = request_for(layout, out, keys, config);
  request.resume = true;
  run_on_threads(request);
  return read_file(out + "/final/model.safetensors");
}

/// A run with the keys, and one with the copies of the state that a host divides.
void check_runs(const std::string& config, Layout layout, std::vector<std::string> keys) {
  SCOPED_TRACE(fmt::format("{} tp {} dp {}", config, layout.tp, layout.dp));
  const TempDir dir;
  const std::string divided = trained(config, layout, dir / "divided", keys);
  std::vector<std::string> flat_keys = keys, copies = keys;
  flat_keys.push_back("parallel.dp_host=0");
  copies.push_back("parallel.dp_shard=2");
  EXPECT_FALSE(trained(config, layout, dir / "flat", flat_keys) == divided) << "another order";
  EXPECT_TRUE(trained(config, layout, dir / "copies", copies) == divided);
  EXPECT_EQ(model_metrics(dir / "copies"), model_metrics(dir / "divided"));
  expect_close(losses(dir / "divided"), losses(dir / "flat"));
  // From the middle, with the other division of the state.
  const std::string step = "/checkpoints/step-00000002";
  std::filesystem::create_directories(dir / "resumed/checkpoints");
  std::filesystem::copy(dir / "copies" + step, dir / "resumed" + step,
                        std::filesystem::copy_options::recursive);
  EXPECT_TRUE(trained(config, layout, dir / "resumed", keys) == divided);
}

TEST(HostSums, DoNotDependOnHowTheStateIsDivided) {
  check_runs("tiny.toml", {1, 4}, {"train.dtype=bf16"});
  check_runs("moe.toml", {1, 4}, {"parallel.ep=2"});
}

TEST(HostSumsLong, DoNotDependOnHowTheStateIsDivided) {
  check_runs("tiny.toml", {1, 6}, {"train.batch=6", "train.microbatch=1"});
  check_runs("tiny.toml", {2, 4}, {"train.dtype=bf16"});
  check_runs("tiny.toml", {1, 4}, {"parallel.pp=2", "train.microbatch=1"});
  check_runs("moe.toml", {1, 8}, {"parallel.ep=2", "train.dtype=bf16"});
}

}  // namespace
}  // namespace tandem
