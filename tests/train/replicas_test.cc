// Logical replicas: a run that continues with fewer ranks, and again with all, has the bits of one
// that never changed, and consumes each sample once.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "core/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/resumed_replicas.h"
#include "engine/data/ledger_check.h"
#include "layouts.h"
#include "temp_dir.h"

namespace tandem {
namespace {

struct Killed {};

struct ReplicaCase {
  std::string config = "tiny.toml";
  int replicas = 4;
  std::vector<int> dp;  ///< of consecutive processes
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

/// Entries of metrics.jsonl about the model, by line.
std::vector<std::string> metrics(const std::string& out) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<std::string> values;
  for (std::string line; std::getline(lines, line);) {
    const auto all = nlohmann::json::parse(line);
    nlohmann::json saved;
    for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens", "batch", "aux_loss",
                            "imbalance", "expert_imbalance", "expert_rows", "validation_loss"}) {
      if (all.contains(key)) saved[key] = all[key];
    }
    values.push_back(saved.dump());
  }
  return values;
}

void expect_bits_of(const std::string& expected, const std::string& out) {
  EXPECT_EQ(metrics(out), metrics(expected));
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
  expect_each_sample_once(dir / "changed", c.replicas == 4 ? 8 : c.replicas * 2);
}

const std::string kUntied = "model.tie_word_embeddings=false", kStep = "train.aux_loss_scope=step";

std::vector<ReplicaCase> sample_cases() {
  return {
      {"tiny.toml", 4, {4, 3, 4}},
      {"tiny.toml", 4, {4, 3, 2}, {"train.dtype=bf16", "train.microbatch=1"}},
      {"tiny.toml", 4, {1, 3, 4}, {"parallel.zero=2", "train.microbatch=1", "parallel.replicas=4"}},
      {"tiny.toml", 4, {4, 3, 4}, {"train.dtype=bf16"}, 2},
      {"moe.toml", 4, {4, 2, 4}, {"parallel.ep=2", "model.router_bias_update_rate=0.01"}},
      {"moe.toml", 4, {4, 3, 1}, {"train.microbatch=1", kStep, "train.dtype=bf16"}},
      {"tiny.toml", 3, {3, 2, 1}, {"parallel.pp=2", "train.microbatch=1", "train.batch=6"}},
  };
}

TEST(Replicas, FewerRanksHaveTheBitsOfAll) {
  for (const ReplicaCase& c : sample_cases()) {
    SCOPED_TRACE(fmt::format("{} tp {} {}", c.config, c.tp, fmt::join(c.keys, " ")));
    check_case(c);
  }
}

}  // namespace
}  // namespace tandem
