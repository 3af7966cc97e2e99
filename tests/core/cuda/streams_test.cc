// Streams that a rank's operators share if ranks share a GPU, and tables that the host writes while
// kernels run.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/cuda/common_stream.h"
#include "core/cuda/upload.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Streams : public OnGpus {};

/// Gathers the value passed by every rank.
std::vector<cudaStream_t> of_all(GpuCommunicator& comm, cudaStream_t local) {
  std::vector<cudaStream_t> all;
  for (const auto& blob : comm.exchange(std::as_bytes(std::span(&local, 1)), "streams")) {
    all.emplace_back();
    std::memcpy(&all.back(), blob.data(), sizeof all.back());
  }
  return all;
}

TEST_P(Streams, AreFewIfRanksShareAGpu) {
  run([](GpuCommunicator& comm) {
    for (const Common which : {Common::side, Common::other_side, Common::capture}) {
      const CommonStream one(which), other(which);
      EXPECT_EQ(one.get() == other.get(), comm.shares_gpu());
      const auto all = of_all(comm, one.get());
      EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size()) << "ranks have one of another";
    }
    if (!comm.shares_gpu()) return;
    const CommonStream prompt(Common::prompt);
    const auto all = of_all(comm, prompt.get());
    EXPECT_EQ(std::set(all.begin(), all.end()).size(), 1u);
    cudaStream_t before = nullptr;
    for (int i = 0; i < 3; ++i) {  // a destroyed one is reused
      const Stream stream;
      if (before) {
        EXPECT_EQ(stream.get(), before);
      }
      before = stream.get();
    }
  });
}

// Destroying a user of a shared stream waits for its own work there and keeps the stream for the
// others.
TEST_P(Streams, OutliveOneOfTheirUsers) {
  run([](GpuCommunicator& comm) {
    if (!comm.shares_gpu()) return;  // every operator has its own
    const CommonStream stays(Common::side);
    const DeviceMemory memory(sizeof(int));
    {
      const CommonStream ends(Common::side);
      launch_pause(200000, ends.get());
      check(cudaMemsetAsync(memory.data(), 1, memory.bytes(), ends.get()), "write");
    }
    check(cudaMemsetAsync(memory.data() + 1, 2, 1, stays.get()), "write");
    check(cudaStreamSynchronize(stays.get()), "wait");
    EXPECT_EQ(read<int>(comm, memory.data(), 1), std::vector<int>{0x01010201});
  });
}

// Written while this rank's kernels are busy, as if waiting for a peer.
TEST_P(Streams, TablesMayBeWrittenWhileKernelsRun) {
  run([](GpuCommunicator& comm) {
    for (const size_t count : {size_t(1), size_t(1000), size_t(100003)}) {  // the last: in chunks
      std::vector<uint32_t> table(count);
      std::iota(table.begin(), table.end(), uint32_t(comm.rank()));
      launch_pause(20000000, comm.stream());
      const DeviceMemory memory = uploaded(table);
      if (comm.shares_gpu()) {
        EXPECT_EQ(cudaStreamQuery(comm.stream()), cudaErrorNotReady);
      }
      EXPECT_EQ(read<uint32_t>(comm, memory.data(), count), table) << count;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Streams, testing::Values(1, 2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
