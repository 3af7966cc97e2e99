// Choices of the tuner on GPU ranks, with timings from a file written by the test.
#include "tune/tuner.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "core/system/env.h"
#include "overlap/ag_gemm/operator.h"
#include "overlap/gemm_rs/operator.h"
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
    for (const OperatorRow* row : {&kAgGemmRow, &kGemmRsRow}) {
      const OpDesc desc = row->describe(comm, {256 * comm.size(), 136, 512, DType::bf16});
      const auto make = [&] { return make_operator(*row, comm, desc, {}, Choosing::fastest); };
      const std::string key = fmt::format("| {} {}", row->name, describe(desc));
      const std::vector<Candidate> candidates = make()->candidates();
      EXPECT_GE(candidates.size(), 4u) << row->name;
      for (const Candidate& fastest : candidates) {
        for (const double us : {99.0, 50.0}) {
          // Rank 0's file decides for all ranks.
          if (comm.rank() == 0) {
            nlohmann::json all = file.read(), times;
            for (const Candidate& candidate : candidates)
              times[candidate.group()] = candidate.name == fastest.name ? us : 100.0;
            int entries = 0;
            for (auto& [name, entry] : all.items()) {
              if (!name.ends_with(key)) continue;
              entry["measured_us"] = times;
              ++entries;
            }
            EXPECT_EQ(entries, 1) << row->name;
            file.write(all);
          }
          comm.barrier("times are there");
          EXPECT_EQ(make()->chosen().group(),
                    us < 98 ? fastest.group() : candidates.front().group())
              << row->name << ": " << fastest.group() << " takes " << us << " us";
        }
      }
      EXPECT_EQ(candidates.front().form, Strategy::serial) << row->name;
    }
  });
}

// A family's times decide which of its candidates is compared with the others.
TEST_P(GpuTuner, TimesOfAFamilySelectItsCandidate) {
  if (!env().tune || env().gpu_portable) GTEST_SKIP() << "no fused kernels, or nothing measured";
  const ScopedTunerFile file;
  run([&](GpuCommunicator& comm) {
    const OpDesc desc = kAgGemmRow.describe(comm, {256 * comm.size(), 136, 512, DType::bf16});
    const auto fused = [&] {
      const auto made = make_operator(kAgGemmRow, comm, desc, {}, Choosing::fastest);
      const auto found = std::ranges::find(made->candidates(), "fused", &Candidate::family);
      return found == made->candidates().end() ? std::string() : found->name;
    };
    fused();
    const std::string key = fmt::format("| ag_gemm fused {}", describe(desc));
    for (const char* fastest : {"256x160 local first 6/8", "128x160 local first 8/8"}) {
      if (comm.rank() == 0) {
        nlohmann::json all = file.read();
        for (auto& [name, entry] : all.items()) {
          if (!name.ends_with(key)) continue;
          for (auto& [candidate, us] : entry["measured_us"].items())
            us = candidate == fastest ? 1.0 : 100.0;
        }
        file.write(all);
      }
      comm.barrier("times are there");
      EXPECT_EQ(fused(), fastest);
    }
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
