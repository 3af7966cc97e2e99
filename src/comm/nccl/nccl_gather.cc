#include "comm/nccl/nccl_gather.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "comm/nccl/nccl_communicator.h"
#include "tandem/error.h"

namespace tandem::gpu {
namespace {

using Clock = std::chrono::steady_clock;

struct Staging {
  std::byte *host = nullptr, *device = nullptr;
  cudaStream_t stream = nullptr;

  explicit Staging(size_t bytes) {
    try {
      check(cudaMallocHost(&host, bytes), "allocate pinned memory");
      check(cudaMalloc(&device, bytes), "allocate device memory");
      check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
    } catch (...) {
      free();
      throw;
    }
  }
  ~Staging() { free(); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

 private:
  void free() {
    if (stream) cudaStreamDestroy(stream);
    cudaFree(device);
    cudaFreeHost(host);
  }
};

}  // namespace

std::vector<std::byte> gather_by_nccl(ncclComm_t comm, std::span<const std::byte> local,
                                      double deadline_s) {
  int rank = 0, size = 0;
  check(ncclCommUserRank(comm, &rank), "ncclCommUserRank");
  check(ncclCommCount(comm, &size), "ncclCommCount");
  std::vector<std::byte> all(local.size() * size_t(size));
  auto staging = std::make_unique<Staging>(all.size());
  const size_t offset = local.size() * size_t(rank);
  const auto begin = Clock::now();
  const auto pause_or_give_up = [&] {
    if (std::chrono::duration<double>(Clock::now() - begin).count() > deadline_s) {
      staging.release();  // NCCL's kernel still uses it
      throw Timeout({"adopt_nccl"}, rank, 0, 0, deadline_s);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  };
  // Waits for a non-blocking communicator.
  const auto settle = [&](ncclResult_t state) {
    while (state == ncclInProgress) {
      pause_or_give_up();
      check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
    }
    check(state, "ncclAllGather on the adopted communicator");
  };
  std::memcpy(staging->host + offset, local.data(), local.size());
  check(cudaMemcpyAsync(staging->device + offset, staging->host + offset, local.size(),
                        cudaMemcpyDefault, staging->stream),
        "copy to the GPU");
  settle(ncclAllGather(staging->device + offset, staging->device, local.size(), ncclInt8, comm,
                       staging->stream));
  check(cudaMemcpyAsync(staging->host, staging->device, all.size(), cudaMemcpyDefault,
                        staging->stream),
        "copy to the host");
  for (;;) {
    const cudaError_t done = cudaStreamQuery(staging->stream);
    if (done == cudaSuccess) break;
    if (done != cudaErrorNotReady) check(done, "ncclAllGather");
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError");
    settle(state);
    pause_or_give_up();
  }
  std::memcpy(all.data(), staging->host, all.size());
  return all;
}

}  // namespace tandem::gpu
