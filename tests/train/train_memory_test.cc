// Memory of training state: its formula, and weights that are in f32 at their owners only.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "core/files.h"
#include "engine/plan/memory.h"
#include "engine/train/model_ranks.h"
#include "layouts.h"
#include "tandem/communicator.h"
#include "temp_dir.h"

namespace tandem {
namespace {

struct MemoryCase {
  int tp, dp;
  std::string dtype;
  std::string codec = "none";
};

/// Bytes a parameter of one rank's optimizer, weights and gradients.
double measured_bytes(const MemoryCase& c, TrainConfig& config) {
  config = request_for({c.tp, c.dp}, "",
                       {"train.dtype=" + c.dtype, "parallel.codec=" + c.codec,
                        "parallel.dp_bucket_mib=0.004", "train.batch=8"})
               .config;
  double bytes = 0;
  WorldOptions options;
  options.ranks = c.tp * c.dp;
  run_threads(options, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(config), false);
    const ModelRanks ranks(groups, config, {});
    if (world.rank() > 0) return;
    const ShardedOptimizer& optimizer = ranks.chunks.front().optimizer;
    bytes = double(optimizer.state_bytes()) / double(optimizer.elements());
  });
  return bytes;
}

TEST(TrainMemory, StateIsWithinTenPercentOfItsFormula) {
  for (const char* dtype : {"f32", "bf16"}) {
    for (const int dp : {1, 2, 3, 4, 8}) {
      for (const int tp : {1, 2}) {
        if (tp * dp > 8) continue;
        SCOPED_TRACE(testing::Message() << dtype << " dp " << dp << " tp " << tp);
        TrainConfig config;
        const double bytes = measured_bytes({tp, dp, dtype}, config);
        const double expected = state_bytes(config, dp).total();
        EXPECT_DOUBLE_EQ(expected, dtype == std::string("f32") ? 8 + 8.0 / dp : 6 + 12.0 / dp);
        EXPECT_NEAR(bytes, expected, 0.1 * expected);
      }
    }
  }
}

TEST(TrainMemory, WireFormatsOfWeightsKeepThemInF32) {
  TrainConfig config;
  const double lossless = measured_bytes({1, 2, "bf16", "weights=lossless"}, config);
  EXPECT_DOUBLE_EQ(state_bytes(config, 2).total(), 6 + 4 + 8.0 / 2);
  EXPECT_NEAR(lossless, 14, 1.4);
  measured_bytes({1, 2, "bf16", "gradients=int8,weights=int8"}, config);
  EXPECT_DOUBLE_EQ(state_bytes(config, 2).total(), 6 + 4 + 12.0 / 2 + 8);
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

}  // namespace
}  // namespace tandem
