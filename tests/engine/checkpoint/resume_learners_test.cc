// Learners that resume: after any step, also while an exchange runs, and at other layouts of their
// ranks.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "core/formats/safetensors.h"
#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/run/resumed_replicas.h"
#include "tandem/error.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/model_metrics.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kSteps = 9;

/// Ranks of each of two learners.
struct Inner {
  int tp = 1, dp = 1;
  std::vector<std::string> keys = {};
};

/// Exchanges after steps 2, 4, 6 and 8, of which three run for a step each.
const std::vector<std::string> kDelayed{"sync.every=4", "sync.fragments=2", "sync.delay=1"};

/// Learner 1's changes of steps 1 and 2 are in its second message.
const FaultPlan kLate("[[fault]]\nstep = 2\nrank = 1\nkind = \"late_message\"\n", "late", 2);

TrainRequest make_request(const Inner& inner, const std::vector<std::string>& sync,
                          const std::string& out, int64_t learners = 2) {
  std::vector<std::string> keys{"train.steps=9",      "train.seq=16",
                                "train.batch=8",      "train.microbatch=1",
                                "optimizer.warmup=0", "parallel.dp_bucket_mib=0.03",
                                "sync.method=local",  "sync.learners=" + std::to_string(learners)};
  keys.insert(keys.end(), sync.begin(), sync.end());
  keys.insert(keys.end(), inner.keys.begin(), inner.keys.end());
  TrainRequest request = request_for({inner.tp, int(learners) * inner.dp}, out, keys);
  request.resume = true;
  if (request.config.parallel.sync.has_quorum()) request.faults = kLate;
  return request;
}

void resume(TrainRequest request) {
  keep_replicas(request.out, request.config);
  EXPECT_EQ(run_on_threads(request).step, kSteps);
}

/// Ends the run after `step`, as a signal does: all learners know of it where a checkpoint is due.
void run_until(TrainRequest request, int step) {
  std::atomic<bool> stop = false;
  request.config.checkpoint.every = step;
  request.stop = &stop;
  request.before_step = [&stop, step](int64_t finished) { stop = finished + 1 >= step; };
  EXPECT_EQ(run_on_threads(request).step, step);
}

/// A folder that has the run's state after `step`.
void copy_run(const std::string& from, int step, const std::string& to) {
  fs::create_directories(to + "/checkpoints");
  fs::copy(checkpoint_path(from, step), checkpoint_path(to, step), fs::copy_options::recursive);
  fs::copy(from + "/metrics.jsonl", to);
}

std::string file_of(const std::string& out, int step, const std::string& name) {
  return read_file(checkpoint_path(out, step) + "/" + name);
}

void expect_same_checkpoint(const std::string& found, const std::string& expected, int step) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(file_of(found, step, name) == file_of(expected, step, name)) << name;
  }
}

void expect_bits_of_an_undisturbed_run(const std::vector<std::vector<std::string>>& syncs) {
  for (const auto& sync : syncs) {
    const TempDir dir;
    const std::string whole = dir / "whole";
    resume(make_request({}, sync, whole));
    for (const int step : {2, 5}) {
      SCOPED_TRACE(fmt::format("{} after step {}", fmt::join(sync, " "), step));
      const std::string again = dir / std::to_string(step);
      run_until(make_request({}, sync, again), step);
      resume(make_request({}, sync, again));
      expect_same_checkpoint(again, whole, kSteps);
      EXPECT_EQ(model_metrics(again), model_metrics(whole));
    }
  }
}
TEST(ResumeLearners, HasTheBitsOfAnUndisturbedRun) {
  expect_bits_of_an_undisturbed_run(
      {kDelayed, {"sync.every=1", "sync.method=demo"}, {"sync.every=2", "sync.quorum=1"}});
}
TEST(ResumeLearnersLong, HasTheBitsOfAnUndisturbedRun) {
  const std::vector<std::string> single{"sync.every=3"};
  const std::vector<std::string> encoded{"sync.every=4", "sync.fragments=2", "sync.delay=1",
                                         "sync.codec=int8"};
  const std::vector<std::string> sparse{"sync.every=4", "sync.fragments=2", "sync.delay=1",
                                        "sync.topk=0.05"};
  const std::vector<std::string> sparse_late{"sync.every=2", "sync.topk=0.05", "sync.quorum=1"};
  expect_bits_of_an_undisturbed_run({single, encoded, sparse, sparse_late});
}

/// Max difference of the tensors of two files, relative to the largest value of each.
double max_difference(const std::string& found, const std::string& expected) {
  const SafetensorsFile a(found), b(expected);
  double worst = 0;
  for (const SafetensorsEntry& entry : b.entries()) {
    std::vector<float> x(size_t(entry.elements())), y(x.size());
    a.read_f32(a.require(entry.name, entry.shape), 0, x);
    b.read_f32(entry, 0, y);
    double difference = 0, largest = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      difference = std::max(difference, std::abs(double(x[i]) - double(y[i])));
      largest = std::max(largest, std::abs(double(y[i])));
    }
    if (difference > 0) worst = std::max(worst, difference / largest);
  }
  return worst;
}

/// Job of all ranks of both learners without [sync].
TrainRequest without_sync(const Inner& inner, const std::string& out) {
  TrainRequest request = make_request(inner, kDelayed, out);
  request.config.parallel.sync = {};
  return request;
}

/// Difference of the final weights of a run that is resumed after step 4 at another layout, to one
/// that was not interrupted.
double resumed_difference(const TrainRequest& request, const std::string& stopped,
                          const std::string& whole) {
  copy_run(stopped, 4, request.out);
  resume(request);
  return max_difference(request.out + "/final/model.safetensors",
                        whole + "/final/model.safetensors");
}

/// Other layouts add up in other orders in each step; exchanges add no more than two roundings to
/// that, of the momentum and of the weights.
TEST(ResumeLearners, DifferFromOtherLayoutsNoMoreThanWithoutExchanges) {
  const TempDir dir;
  const Inner first{1, 2};
  for (const std::string kind : {"with", "without"}) {
    const auto request = [&](const Inner& inner, const std::string& out) {
      return kind == "with" ? make_request(inner, kDelayed, out) : without_sync(inner, out);
    };
    resume(request(first, dir / (kind + "/whole")));
    run_until(request(first, dir / (kind + "/stopped")), 4);
  }
  for (const Inner& inner : {Inner{2, 1}, Inner{1, 1}, Inner{1, 2, {"parallel.zero=2"}},
                             Inner{1, 1, {"parallel.pp=2"}}}) {
    const std::string name = fmt::format("tp{}dp{}{}", inner.tp, inner.dp, inner.keys.size());
    const double without = resumed_difference(without_sync(inner, dir / ("without/" + name)),
                                              dir / "without/stopped", dir / "without/whole");
    const double with = resumed_difference(make_request(inner, kDelayed, dir / ("with/" + name)),
                                           dir / "with/stopped", dir / "with/whole");
    fmt::print("{}: {:.2g} with [sync], {:.2g} without\n", name, with, without);
    EXPECT_LE(with, std::max(1e-7, without + 0x1p-23)) << name;
  }
  TrainRequest other = make_request(first, kDelayed, dir / "with/other");
  other.config.parallel.sync.outer_lr = 0.69;
  EXPECT_GT(resumed_difference(other, dir / "with/stopped", dir / "with/whole"), 1e-5) << "control";
}

/// A momentum of cosines is read at the places of the whole matrix, whatever the ranks.
TEST(ResumeLearners, OtherLayoutsHaveTheSameCosines) {
  const TempDir dir;
  const std::vector<std::string> demo{"sync.method=demo", "sync.tile=16", "sync.topk=8",
                                      "model.ffn=96"};
  const std::string whole = dir / "whole", stopped = dir / "stopped";
  resume(make_request({1, 2}, demo, whole));
  run_until(make_request({1, 2}, demo, stopped), 6);
  const auto last_loss = [&](const Inner& inner, const std::string& out) {
    TrainRequest request = make_request(inner, demo, out);
    resume(request);
    return losses(out).back();
  };
  for (const Inner& inner : {Inner{2, 1}, Inner{1, 1}, Inner{1, 1, {"parallel.pp=2"}}}) {
    const std::string out = dir / fmt::format("tp{}{}", inner.tp, inner.keys.size());
    copy_run(stopped, 6, out);
    EXPECT_NEAR(last_loss(inner, out), losses(whole).back(), 1e-6 * losses(whole).back()) << out;
  }
}

TEST(ResumeLearners, OtherLayoutsOfALearnerHaveTheSameState) {
  const TempDir dir;
  const Inner first{1, 2};
  const std::string whole = dir / "whole", stopped = dir / "stopped";
  resume(make_request(first, kDelayed, whole));
  run_until(make_request(first, kDelayed, stopped), 4);
  int number = 0;
  for (const Inner& inner : {Inner{2, 1}, Inner{1, 1}, Inner{1, 2, {"parallel.zero=2"}},
                             Inner{1, 1, {"parallel.pp=2"}}}) {
    const std::string out = dir / fmt::format("layout{}", number++);
    SCOPED_TRACE(fmt::format("tp {} dp {} {}", inner.tp, inner.dp, inner.keys.size()));
    // It saves again what it has read, while a fragment travels.
    TrainRequest same = make_request(inner, kDelayed, out);
    same.config.train.steps = 4;
    copy_run(stopped, 4, out);
    keep_replicas(out, same.config);
    const auto weights = checkpoint_path(out, 4) + "/model.safetensors";
    fs::last_write_time(weights, fs::file_time_type::min());
    EXPECT_EQ(run_on_threads(same).step, 4);
    EXPECT_GT(fs::last_write_time(weights), fs::file_time_type::min());
    expect_same_checkpoint(out, stopped, 4);
    resume(make_request(inner, kDelayed, out));
    EXPECT_LE(max_difference(out + "/final/model.safetensors", whole + "/final/model.safetensors"),
              1e-6);
    for (int step = 0; step < kSteps; ++step) {
      const double expected = losses(whole)[size_t(step)];
      EXPECT_NEAR(losses(out)[size_t(step)], expected, 1e-7 * expected) << "step " << step + 1;
    }
  }
}

TEST(ResumeLearners, RefusesOtherLearnersAndExchanges) {
  const TempDir dir;
  const std::string out = dir / "out";
  resume(make_request({}, kDelayed, out));
  const auto error_of = [](const TrainRequest& request) {
    try {
      run_on_threads(request);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(error_of(make_request({}, kDelayed, out, 4)),
              HasSubstr("sync.learners is 2 in this checkpoint: expected 4; start a new run with "
                        "--init"));
  TrainRequest without = make_request({}, kDelayed, out);
  without.config.parallel.sync = {};
  EXPECT_THAT(error_of(without), HasSubstr("sync.learners is 2 in this checkpoint: expected 1"));
  EXPECT_THAT(error_of(make_request({}, {"sync.every=5", "sync.fragments=2", "sync.delay=1"}, out)),
              HasSubstr("sync.every is 4 in this checkpoint: expected 5"));
  EXPECT_EQ(error_of(make_request({}, kDelayed, out)), "");
}

/// Otherwise it would lose what late learners have not sent.
/// Error of a run of four learners, or empty.
std::string error_of_run(const std::string& out, std::vector<std::string> sync) {
  sync.push_back("sync.every=2");
  TrainRequest request = make_request({}, sync, out, 4);
  request.faults = {};
  try {
    EXPECT_EQ(run_on_threads(request).step, kSteps);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(ResumeLearners, KeepsAQuorum) {
  const TempDir dir;
  const auto error_of = [&](const char* quorum) { return error_of_run(dir / "out", {quorum}); };
  EXPECT_EQ(error_of("sync.quorum=1"), "");
  EXPECT_THAT(error_of("sync.quorum=0"), HasSubstr("sync.quorum is 1 in this checkpoint: "
                                                   "expected 0; without a quorum"));
  EXPECT_THAT(error_of("sync.quorum=4"), HasSubstr("sync.quorum is 1 in this checkpoint: "
                                                   "expected 4; without a quorum"));
  EXPECT_EQ(error_of("sync.quorum=2"), "");
}

TEST(ResumeLearners, KeepsChangesThatWereNotSent) {
  const TempDir dir;
  const std::string sparse = dir / "sparse", dense = dir / "dense", late = dir / "late";
  EXPECT_EQ(error_of_run(sparse, {"sync.topk=0.05"}), "");
  EXPECT_THAT(error_of_run(sparse, {}), HasSubstr("sync.topk is 0.05 in this checkpoint: expected "
                                                  "it in this run, too; without it the changes "));
  EXPECT_THAT(error_of_run(sparse, {"sync.codec=int8"}), HasSubstr("sync.topk is 0.05"));
  EXPECT_EQ(error_of_run(sparse, {"sync.topk=0.1", "sync.bits=4", "sync.beta=1"}), "");
  // Late learners have a place for them, too, and nothing is left of dense messages of all.
  EXPECT_EQ(error_of_run(late, {"sync.topk=0.05", "sync.quorum=3"}), "");
  EXPECT_EQ(error_of_run(late, {"sync.quorum=3"}), "");
  EXPECT_EQ(error_of_run(dense, {}), "");
  EXPECT_EQ(error_of_run(dense, {"sync.topk=0.05"}), "");
}

}  // namespace
}  // namespace tandem
