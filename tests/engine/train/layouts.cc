#include "layouts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>

#include "engine/parallel/dims.h"
#include "gemm/gemm.h"
#include "sample_text.h"
#include "temp_dir.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/train/known_peak.h"
#include "tests/engine/train/run_results.h"
#include "tests/init_tests.h"

namespace tandem {

Communicator* mpi_world = nullptr;

std::vector<Layout> layouts() {
  std::vector<Layout> all;
  for (const int tp : {1, 2, 4}) {
    for (const int dp : {1, 2}) {
      if (!mpi_world || tp * dp == mpi_world->size()) all.push_back({tp, dp});
    }
  }
  return all;
}

TrainRequest request_for(Layout layout, const std::string& out,
                         const std::vector<std::string>& overrides, const std::string& config) {
  TrainRequest request;
  std::vector<std::string> all{"train.seq=32"};  // half the configuration's tokens, half the time
  all.insert(all.end(), overrides.begin(), overrides.end());
  request.config = load_config(TANDEM_SOURCE_DIR "/configs/" + config, with_sample_text(all));
  request.config.parallel.tp = layout.tp;
  request.config.parallel.dp = layout.dp;
  // If a GEMM's bits depend on its number of rows, no choice may depend on timing.
  auto& strategy = request.config.parallel.strategy;
  if (!rows_keep_bits() && strategy == "automatic") strategy = "serial";
  request.out = out;
  return request;
}

TrainEnd run_on_threads(const TrainRequest& given) {
  const TrainRequest request = with_known_peak(given);
  check_config(request.config);
  const std::unique_ptr<const TokenSource> source = open_configured(request.config);
  WorldOptions options;
  options.ranks = ParallelDims(request.config.parallel).ranks();
  const std::string& link = request.config.parallel.link;
  if (!link.empty()) options.link = EmulatedLink::parse(link);
  TrainEnd end;
  run_threads(options, [&](Communicator& comm) {
    const TrainEnd of_rank = train(comm, request, *source);
    if (comm.rank() == 0) end = of_rank;
  });
  return end;
}

TrainEnd run_layout(TrainRequest request) {
  if (!mpi_world) return run_on_threads(request);
  // Each process has its own folders: rank 0's are used.
  const auto take_rank_0s = [](std::string& folder) {
    const auto folders = mpi_world->exchange(std::as_bytes(std::span(folder)), "folder");
    folder.assign(reinterpret_cast<const char*>(folders[0].data()), folders[0].size());
  };
  take_rank_0s(request.out);
  for (std::string& path : request.config.data.paths) take_rank_0s(path);
  return train(*mpi_world, with_known_peak(request), *open_configured(request.config));
}

bool is_root() {
  return !mpi_world || mpi_world->rank() == 0;
}

std::vector<double> losses(const std::string& out) {
  std::vector<double> values;
  for (const nlohmann::json& entry : steps_of(out)) {
    EXPECT_EQ(entry["step"].get<int64_t>(), int64_t(values.size()) + 1);
    values.push_back(entry["loss"].get<double>());
  }
  return values;
}

void expect_close(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_LE(std::abs(got[i] - expected[i]), 1e-5 * expected[i]) << "step " << i + 1;
  }
}

}  // namespace tandem

int main(int argc, char** argv) {
  const tandem::TempDir cache;
  ::setenv("TANDEM_CACHE_DIR", cache.path().c_str(), 1);
  ::setenv("TANDEM_THREADS", "1", 1);
  tandem::test::init_tests(&argc, argv);
  if (!tandem::launched_by_mpi()) return RUN_ALL_TESTS();
  int failed = 1;
  tandem::run_mpi({}, [&](tandem::Communicator& comm) {
    tandem::mpi_world = &comm;
    failed = RUN_ALL_TESTS();
  });
  return failed;
}
