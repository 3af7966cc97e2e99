// Training whose gradients and weights travel between data-parallel ranks over a wire format.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>

#include "core/files.h"
#include "layouts.h"
#include "tandem/error.h"
#include "temp_dir.h"

namespace tandem {
namespace {

using testing::HasSubstr;

std::vector<Layout> parallel_layouts() {
  std::vector<Layout> all;
  for (const Layout layout : {Layout{1, 2}, {1, 4}, {2, 2}, {2, 4}}) {
    if (!mpi_world || layout.tp * layout.dp == mpi_world->size()) all.push_back(layout);
  }
  return all;
}

std::string name_of(Layout layout) {
  return "tp" + std::to_string(layout.tp) + "dp" + std::to_string(layout.dp);
}

std::string final_weights(const std::string& out) {
  return read_file(out + "/final/model.safetensors");
}

TEST(TrainCodec, LosslessIsThePlainRun) {
  const TempDir dir;
  for (const Layout layout : parallel_layouts()) {
    SCOPED_TRACE(name_of(layout));
    const std::string plain = dir / ("plain" + name_of(layout)), out = dir / name_of(layout);
    const std::vector<std::string> steps{"train.steps=8", "train.microbatch=1",
                                         "parallel.bucket_mb=0.05"};
    run_layout(request_for(layout, plain, steps));
    auto with = steps;
    with.push_back("parallel.codec=gradients=lossless,weights=lossless");
    run_layout(request_for(layout, out, with));
    if (!is_root()) continue;
    EXPECT_EQ(losses(out), losses(plain));
    EXPECT_EQ(final_weights(out), final_weights(plain));
    EXPECT_FALSE(path_exists(out + "/checkpoints/step-00000008/residuals.safetensors"));
  }
}

// Residuals and the owners' weights are in the checkpoint.
TEST(TrainCodec, AResumedRunHasTheBitsOfOneThatWasNot) {
  const TempDir dir;
  for (const Layout layout : parallel_layouts()) {
    for (const std::string codec :
         {"gradients=int2:g64,weights=int8", "gradients=int4:g32", "weights=int4"}) {
      if (codec.find(',') == codec.npos && layout.tp == 1) continue;  // each alone: on one layout
      SCOPED_TRACE(name_of(layout) + " " + codec);
      const std::string name = name_of(layout) + codec;
      const std::string whole = dir / ("whole" + name), out = dir / ("stopped" + name);
      const std::vector<std::string> overrides{"train.steps=5", "parallel.codec=" + codec,
                                               "parallel.bucket_mb=0.05"};
      run_layout(request_for(layout, whole, overrides));
      TrainRequest request = request_for(layout, out, overrides);
      const std::atomic<bool> stop{!mpi_world || mpi_world->rank() == mpi_world->size() - 1};
      for (int step = 1; step <= 2; ++step) {  // each ends after one more step
        request.stop = &stop;
        EXPECT_EQ(run_layout(request).step, step);
        request.resume = true;
      }
      request.stop = nullptr;
      EXPECT_EQ(run_layout(request).step, 5);
      if (!is_root()) continue;
      EXPECT_EQ(losses(out), losses(whole));
      EXPECT_EQ(final_weights(out), final_weights(whole));
      const std::string at = out + "/checkpoints/step-00000005/";
      EXPECT_EQ(path_exists(at + "residuals.safetensors"), codec.starts_with("gradients"));
    }
  }
}

TEST(TrainCodec, WithoutDataParallelItIsRefused) {
  for (const std::string codec : {"gradients=int4", "weights=lossless"}) {
    try {
      check_config(request_for({2, 1}, "", {"parallel.codec=" + codec}).config);
      ADD_FAILURE() << "accepted " << codec;
    } catch (const ConfigError& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("parallel.codec: codec '" + codec + "': one data-parallel rank"));
    }
  }
}

TEST(TrainCodec, RanksThatDifferAreNamed) {
  if (mpi_world) GTEST_SKIP() << "tests/train/ranks_differ_test.sh";
  const TempDir dir;
  std::atomic<int> refusals{0};
  const TrainRequest request =
      request_for({1, 2}, dir / "run", {"train.steps=2", "parallel.codec=gradients=int4"});
  TrainRequest other = request;
  other.config.parallel.codec = "gradients=int8";
  const Corpus corpus(request.config.data.paths, request.config.data.heldout);
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    try {
      train(comm, comm.rank() == 0 ? request : other, corpus);
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(), HasSubstr("codec = 'gradients=int4'"));
      EXPECT_THAT(error.what(), HasSubstr("codec = 'gradients=int8'"));
      ++refusals;
    }
  });
  EXPECT_EQ(refusals, 2);
}

}  // namespace
}  // namespace tandem
