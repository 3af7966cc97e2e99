// Logical replicas: a run that continues with fewer ranks, and again with all, has the bits of one
// that never changed, and consumes each sample once.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/resumed_replicas.h"
#include "engine/data/ledger/ledger_check.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

struct Killed {};

struct ReplicaCase {
  std::string config = "tiny.toml";
  int replicas = 4;
  std::vector<int> dp = {};  ///< of consecutive processes
  std::vector<std::string> keys = {};
  int tp = 1;
};

constexpr int kSteps = 6;

/// Trains until a process is killed before step `killed` + 1, with checkpoints every two steps.
void train_until(const ReplicaCase& c, int dp, int killed, const std::string& out) {
  std::vector<std::string> keys{"train.steps=" + std::to_string(kSteps), "train.seq=16",
                                "checkpoint.every=2", "checkpoint.keep=1",
                                "parallel.dp_bucket_mib=0.02"};
  keys.insert(keys.end(), c.keys.begin(), c.keys.end());
  TrainRequest request = request_for({c.tp, dp}, out, keys, c.config);
  request.resume = true;
  EXPECT_EQ(keep_replicas(out, request.config), "");
  request.before_step = [killed](int64_t step) {
    if (step == killed) throw Killed();
  };
  if (killed >= kSteps) {
    EXPECT_EQ(run_on_threads(request).step, kSteps);
  } else {
    EXPECT_THROW(run_on_threads(request), Killed);
  }
}

void expect_bits_of(const std::string& expected, const std::string& out) {
  EXPECT_EQ(model_metrics(out), model_metrics(expected));
  for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(read_file(checkpoint_path(out, kSteps) + "/" + file) ==
                read_file(checkpoint_path(expected, kSteps) + "/" + file))
        << file;
  }
}

void expect_each_sample_once(const std::string& out, int64_t batch) {
  const LedgerCheck check = check_ledger(out + "/ledger.jsonl", {});
  EXPECT_TRUE(check.problems.empty()) << check.problems.front();
  EXPECT_EQ(check.steps, kSteps);
  EXPECT_EQ(check.next_sample, kSteps * batch);
}

void check_case(const ReplicaCase& c) {
  const TempDir dir;
  train_until(c, c.replicas, kSteps, dir / "undisturbed");
  // Killed after 3 steps, of which 2 are saved, and after 5, of which 4 are.
  for (size_t i = 0; i < c.dp.size(); ++i) {
    train_until(c, c.dp[i], i + 1 < c.dp.size() ? 2 * int(i) + 3 : kSteps, dir / "changed");
  }
  expect_bits_of(dir / "undisturbed", dir / "changed");
  expect_each_sample_once(dir / "changed", c.replicas * 2);
}

const std::string kUntied = "model.tie_word_embeddings=false", kStep = "train.aux_loss_scope=step";

std::vector<ReplicaCase> sample_cases() {
  return {
      {"tiny.toml", 4, {4, 3, 4}, {"train.validate_every=2", "data.val_fraction=0.3"}},
      {"tiny.toml", 4, {4, 3, 2}, {"train.dtype=bf16", "train.microbatch=1"}},
      {"tiny.toml", 4, {1, 3, 4}, {"parallel.zero=2", "train.microbatch=1", "parallel.replicas=4"}},
      {"tiny.toml", 4, {4, 3, 4}, {"train.dtype=bf16"}, 2},
      {"moe.toml", 4, {4, 2, 4}, {"parallel.ep=2", "model.router_bias_update_rate=0.01"}},
      {"moe.toml", 4, {4, 3, 1}, {"train.microbatch=1", kStep, "train.dtype=bf16"}},
      {"tiny.toml", 3, {3, 2, 1}, {"parallel.pp=2", "train.microbatch=1", "train.batch=6"}},
  };
}

/// Every second one, from `first` on.
void check_samples(size_t first) {
  const std::vector<ReplicaCase> cases = sample_cases();
  for (size_t i = first; i < cases.size(); i += 2) {
    const ReplicaCase& c = cases[i];
    SCOPED_TRACE(fmt::format("{} tp {} {}", c.config, c.tp, fmt::join(c.keys, " ")));
    check_case(c);
  }
}
TEST(Replicas, FewerRanksHaveTheBitsOfAll) {
  check_samples(1);
}
TEST(ReplicasLong, FewerRanksHaveTheBitsOfAllInOtherSamples) {
  check_samples(0);
}

/// A layout of at most 8 ranks, and another number of them after every kill.
ReplicaCase case_of(uint64_t number) {
  const auto words = philox(43, 1, number), more = philox(43, 2, number);
  const bool experts = words[0] % 3 == 0;
  ReplicaCase c{experts ? "moe.toml" : "tiny.toml"};
  const int ep = experts ? 1 + int(words[1] % 2) : 1;
  c.replicas = ep * (2 + int(words[2] % (ep == 1 ? 5 : 2)));  // up to 6
  const int pp = c.replicas <= 4 && words[3] % 3 == 0 ? 2 : 1;
  c.tp = c.replicas * pp <= 4 ? 1 + int(more[0] % 2) : 1;
  for (int i = 0; i < 3; ++i) {
    c.dp.push_back(ep * (1 + int(philox(43, 3 + uint64_t(i), number)[0] % (c.replicas / ep))));
  }
  const bool has_microbatches = pp > 1 || more[1] % 2 == 0;
  c.keys = {fmt::format("parallel.replicas={}", c.replicas),
            fmt::format("train.batch={}", 2 * c.replicas),
            fmt::format("parallel.ep={}", ep),
            fmt::format("parallel.pp={}", pp),
            fmt::format("parallel.zero={}", pp == 1 ? 1 + more[2] % 2 : 1),
            fmt::format("train.microbatch={}", has_microbatches ? 1 : 0),
            fmt::format("train.dtype={}", more[3] % 2 == 0 ? "f32" : "bf16"),
            kStep};
  return c;
}

void check_generated(uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    const ReplicaCase c = case_of(i);
    SCOPED_TRACE(fmt::format("{}: {} tp {} dp {} {}", i, c.config, c.tp, fmt::join(c.dp, " "),
                             fmt::join(c.keys, " ")));
    check_case(c);
  }
}

TEST(ReplicasLong, FewerRanksHaveTheBitsOfAll) {
  check_generated(0, 60);
}

/// "accepted", or the error of a job with these keys.
std::string verdict(std::vector<std::string> keys, const std::vector<std::string>& more) {
  keys.insert(keys.end(), more.begin(), more.end());
  try {
    check_config(parse_config("[data]\npaths = \"x\"\n", "j", keys));
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Replicas, RanksRunSeveralIfTheirBitsCanBeKept) {
  const auto check = [](const std::vector<std::string>& more) {
    return verdict({"parallel.replicas=4", "parallel.dp=3", "train.batch=8"}, more);
  };
  const std::string refused = "parallel.replicas is 4 with parallel.dp = 3: expected ";
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"parallel.dp=4"}), "accepted");
  EXPECT_EQ(check({"train.microbatch=2", "parallel.zero=2"}), "accepted");
  EXPECT_EQ(check({"train.batch=6"}),
            "train.batch is 6: expected a multiple of parallel.replicas = 4");
  EXPECT_EQ(check({"train.microbatch=4"}),
            "train.microbatch is 4: expected a divisor of train.batch / parallel.replicas = 2");
  EXPECT_EQ(check({"parallel.dp=8"}),
            "parallel.replicas is 4: expected 0, or at least parallel.dp = 8, so that every rank "
            "has one");
  EXPECT_EQ(check({"parallel.codec=weights=lossless,gradients=lossless"}), "accepted");
  EXPECT_EQ(check({"parallel.codec=gradients=int8"}),
            refused + "parallel.codec without lossy gradients or weights, not \"gradients=int8\"");
  EXPECT_EQ(check({"parallel.codec=gradients=int8", "parallel.dp=4"}), "accepted");
  EXPECT_EQ(check({"parallel.zero=0"}), refused + "parallel.zero = 1, which has the same bits");
  EXPECT_EQ(check({"optimizer.name=lamb"}), refused + "optimizer.name = \"adamw\"");
  EXPECT_EQ(check({"parallel.zero=2", "parallel.pp=2", "model.tie_word_embeddings=false"}),
            refused + "parallel.zero = 1 or pp = 1");
  const std::string experts = "model.experts=8";
  EXPECT_EQ(check({experts}), "accepted");
  EXPECT_EQ(check({experts, "train.microbatch=1"}), refused + "train.aux_loss_scope = \"step\"");
  EXPECT_EQ(check({experts, "train.microbatch=1", "train.aux_loss_scope=step"}), "accepted");
  EXPECT_EQ(check({experts, "train.microbatch=1", "model.aux_loss_coeff=0"}), "accepted");
  EXPECT_EQ(check({experts, "parallel.dp=3", "parallel.ep=3"}),
            "parallel.replicas is 4: expected a multiple of parallel.ep = 3");
  EXPECT_EQ(check({experts, "parallel.dp=3", "parallel.ep=2"}),
            "parallel.ep is 2: expected a divisor of parallel.dp = 3");
}

TEST(Replicas, ShardGroupsDivideTheRanks) {
  const auto check = [](const std::vector<std::string>& more) {
    return verdict({"parallel.dp_shard=2", "parallel.dp=4", "train.batch=8"}, more);
  };
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"model.experts=8", "parallel.ep=2"}), "accepted");
  EXPECT_EQ(check({"parallel.dp_shard=3"}),
            "parallel.dp_shard is 3: expected a divisor of parallel.dp = 4");
  EXPECT_EQ(check({"parallel.dp_shard=8", "parallel.dp=4"}),
            "parallel.dp_shard is 8: expected a divisor of parallel.dp = 4");
  EXPECT_EQ(check({"model.experts=8", "parallel.ep=4"}),
            "parallel.dp_shard is 2: expected a multiple of parallel.ep = 4");
  EXPECT_EQ(check({"parallel.zero=2"}),
            "parallel.dp_shard is 2: expected 0 with parallel.zero = 2");
  EXPECT_EQ(check({"optimizer.name=lamb"}),
            "parallel.dp_shard is 2: expected 0 with optimizer.name = \"lamb\"");
  EXPECT_EQ(check({"parallel.dp_shard=1", "optimizer.name=lamb"}),
            "parallel.dp_shard is 1: expected optimizer.name = \"adamw\", or 0");
  EXPECT_EQ(check({"parallel.replicas=8"}),
            "parallel.replicas is 8 with parallel.dp = 4: expected parallel.dp_shard = 0, which "
            "has the same bits");
}

TEST(Replicas, HostsDivideTheRanks) {
  const auto check = [](const std::vector<std::string>& more) {
    return verdict({"parallel.dp_host=2", "parallel.dp=4", "train.batch=8"}, more);
  };
  const std::string refused = "parallel.dp_host is 2: expected ";
  EXPECT_EQ(check({}), "accepted");
  EXPECT_EQ(check({"parallel.dp_shard=2"}), "accepted");
  EXPECT_EQ(check({"model.experts=8", "parallel.ep=2"}), "accepted");
  EXPECT_EQ(check({"parallel.dp_host=3"}),
            "parallel.dp_host is 3: expected a divisor of parallel.dp = 4");
  EXPECT_EQ(check({"model.experts=8", "parallel.ep=4"}), refused + "a multiple of parallel.ep = 4");
  EXPECT_EQ(check({"parallel.zero=2"}), refused + "0 with parallel.zero = 2");
  EXPECT_EQ(check({"parallel.zero=0"}), refused + "0 with parallel.zero = 0");
  EXPECT_EQ(check({"parallel.dp_shard=1"}), refused + "0 or parallel.dp_shard = 1");
  EXPECT_EQ(check({"parallel.replicas=8"}), refused + "0 with parallel.replicas = 8");
  EXPECT_EQ(check({"parallel.codec=gradients=int8"}),
            refused + "0 with wire formats of gradients or weights, \"gradients=int8\"");
  EXPECT_EQ(check({"optimizer.name=lamb"}), refused + "0 with optimizer.name = \"lamb\"");
}

}  // namespace
}  // namespace tandem
