// Pipeline parallel runs: every layout and schedule has the bits of one stage with the same
// microbatches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files.h"
#include "layouts.h"
#include "sample_text.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

using Overrides = std::vector<std::string>;

struct PipelineCase {
  std::string config;
  int tp, dp;
  int64_t pp;
  Overrides overrides;
};

/// Values of a key in OUT/metrics.jsonl.
std::vector<double> metrics(const std::string& out, const std::string& key) {
  std::istringstream lines(read_file(out + "/metrics.jsonl"));
  std::vector<double> values;
  for (std::string line; std::getline(lines, line);) {
    values.push_back(nlohmann::json::parse(line).at(key).get<double>());
  }
  return values;
}

TrainRequest pipeline_request(const PipelineCase& c, int64_t pp, const std::string& out) {
  Overrides overrides{"train.steps=3", "train.batch=8",   "train.microbatch=1",
                      "train.seq=16",  "train.dtype=f32", "parallel.strategy=serial"};
  overrides.insert(overrides.end(), c.overrides.begin(), c.overrides.end());
  TrainRequest request = request_for({c.tp, c.dp}, out, overrides, c.config);
  request.config.parallel.pp = pp;
  if (pp == 1) {
    request.config.parallel.virtual_stages = 1;
    request.config.parallel.layers_per_stage.clear();
  }
  return request;
}

/// Whole tensors of the last checkpoint and losses and norms of all steps.
struct RunBits {
  std::string model, optimizer;
  std::vector<double> losses, norms;
  bool operator==(const RunBits&) const = default;
};

RunBits read_bits(const std::string& out, const TrainEnd& end) {
  return {read_file(end.checkpoint + "/model.safetensors"),
          read_file(end.checkpoint + "/optimizer.safetensors"), metrics(out, "loss"),
          metrics(out, "grad_norm")};
}

void expect_same_bits(const PipelineCase& c) {
  SCOPED_TRACE(c.config + " tp " + std::to_string(c.tp) + " dp " + std::to_string(c.dp) + " pp " +
               std::to_string(c.pp) + (c.overrides.empty() ? "" : " " + c.overrides.front()));
  const TempDir dir;
  const TrainEnd one = run_on_threads(pipeline_request(c, 1, dir / "one"));
  const TrainEnd stages = run_on_threads(pipeline_request(c, c.pp, dir / "stages"));
  const RunBits expected = read_bits(dir / "one", one), found = read_bits(dir / "stages", stages);
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_TRUE(found.model == expected.model) << "weights";
  EXPECT_TRUE(found.optimizer == expected.optimizer) << "moments";
}

const std::string kFourLayers = "model.layers=4", kUntied = "model.tie_word_embeddings=false";

TEST(TrainPipeline, StagesHaveTheBitsOfOne) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const PipelineCase cases[] = {
      {"tiny.toml", 1, 1, 2, {}},
      {"tiny.toml", 1, 1, 2, {kUntied}},
      {"tiny.toml", 1, 1, 3, {"model.layers=5", "train.batch=6", "train.microbatch=2"}},
      {"tiny.toml", 1, 1, 4, {kFourLayers, "parallel.schedule=gpipe"}},
      {"tiny.toml", 2, 1, 2, {"train.microbatch=2"}},
      {"tiny.toml", 1, 2, 2, {"parallel.dp_bucket_mib=0.05"}},
      {"tiny.toml", 2, 2, 2, {"train.dtype=bf16"}},
      {"tiny.toml", 1, 2, 2, {"parallel.codec=gradients=int4:g32,weights=int8", kUntied}},
      {"tiny.toml", 1, 1, 2, {"train.microbatch=0"}},
      {"tiny.toml", 1, 2, 2, {"model.parallel_block=true", kUntied}},
  };
  for (const PipelineCase& c : cases) expect_same_bits(c);
}

}  // namespace
}  // namespace tandem
