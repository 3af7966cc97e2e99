// Choices of the tuner on GPU ranks, with timings from a file written by the test.
#include "tune/tuner.h"

#include <fmt/format.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/overlap.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

class GpuTuner : public OnGpus {};

// Gives the tuner its own file, which the test may change, for the object's lifetime.
class ScopedTunerFile {
 public:
  ScopedTunerFile() : path_(env().cache_dir + "/tuner.json"), saved_path_(path_ + ".kept") {
    if (std::filesystem::exists(path_)) std::filesystem::rename(path_, saved_path_);
    forget_tuned();
  }
  ~ScopedTunerFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
    if (std::filesystem::exists(saved_path_, ignored))
      std::filesystem::rename(saved_path_, path_, ignored);
    forget_tuned();
  }
  ScopedTunerFile(const ScopedTunerFile&) = delete;
  ScopedTunerFile& operator=(const ScopedTunerFile&) = delete;

  nlohmann::json read() const {
    return nlohmann::json::parse(std::ifstream(path_), nullptr, false);
  }
  void write(const nlohmann::json& all) const {
    std::ofstream(path_) << all;
    forget_tuned();
  }

 private:
  std::string path_, saved_path_;
};

// Timings are set by the test: each candidate in turn is the fastest by little or by much.
TEST_P(GpuTuner, SelectsTheFastestUnlessSerialIsNearlyAsFast) {
  if (!env().tune) GTEST_SKIP() << "nothing may be measured";
  const ScopedTunerFile file;
  run([&](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{256 * comm.size(), 136, 512};
    const auto expect_choices = [&](const std::string& name, const auto& make) {
      const std::string of_algorithms = fmt::format("| {} m {} n 136 k 512 bf16", name, shape.m);
      const std::vector<Algorithm> algorithms = make().algorithms();
      EXPECT_GE(algorithms.size(), 4u) << name;
      for (const Algorithm fastest : algorithms) {
        for (const double us : {99.0, 50.0}) {
          // Rank 0's file decides for all ranks.
          if (comm.rank() == 0) {
            nlohmann::json all = file.read(), times;
            for (const Algorithm algorithm : algorithms)
              times[gpu::name_of(algorithm)] = algorithm == fastest ? us : 100.0;
            int entries = 0;
            for (auto& [key, entry] : all.items()) {
              if (!key.ends_with(of_algorithms)) continue;
              entry["measured_us"] = times;
              ++entries;
            }
            EXPECT_EQ(entries, 1) << name;
            file.write(all);
          }
          comm.barrier("times are there");
          EXPECT_EQ(gpu::name_of(make().algorithm()),
                    gpu::name_of(us < 98 ? fastest : algorithms.front()))
              << name << ": " << gpu::name_of(fastest) << " takes " << us << " us";
        }
      }
      EXPECT_TRUE(is_serial(algorithms.front())) << name;
    };
    expect_choices("ag_gemm", [&] { return gpu::AgGemm(comm, lt, shape); });
    expect_choices("gemm_rs", [&] { return gpu::GemmRs(comm, lt, shape); });
  });
}

TEST_P(GpuTuner, MeasuredTimesAreCachedAndReused) {
  if (!env().tune) GTEST_SKIP() << "nothing may be measured";
  const ScopedTunerFile file;
  const auto strategy = [&] {
    std::atomic<Strategy> chosen = Strategy::automatic;
    run([&](GpuCommunicator& comm) {
      chosen = tandem::GemmRs(comm, {96, 64, 64, DType::bf16}).strategy();
    });
    return chosen.load();
  };
  strategy();
  nlohmann::json cache = file.read();
  std::string key;
  for (const auto& [name, entry] : cache.items()) {
    if (name.find("gemm_rs m 96 n 64 k 64 bf16") != std::string::npos) key = name;
  }
  ASSERT_NE(key, "");
  auto& times = cache[key]["measured_us"];
  ASSERT_TRUE(times.contains("chunked"));
  for (const bool serial : {true, false}) {
    for (const auto& [algorithm, us] : times.items()) {
      us = algorithm.starts_with("serial") == serial ? 1.0 : 100.0;
    }
    file.write(cache);
    EXPECT_EQ(strategy(), serial ? Strategy::serial : Strategy::overlapped);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GpuTuner, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
