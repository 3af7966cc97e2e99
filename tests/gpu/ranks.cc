// GPU ranks for the conformance suite.
#include "tests/comm/ranks.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>

#include "tandem/cuda.h"
#include "tests/gpu/outcome.h"

namespace tandem::test {
namespace {

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

}  // namespace

std::string name_of(const testing::TestParamInfo<Setup>& info) {
  return "gpus" + std::to_string(info.param.ranks);
}

std::vector<Setup> setups() {
  std::vector<Setup> all;
  for (const int ranks : {1, 2, 3, 4, 8, 16}) {  // the last: two teams
    if (ranks <= std::max(gpu_count(), gpu_count() == 1 ? 16 : 0)) all.push_back({ranks, false});
  }
  return all;
}

Communicator* mpi_world() {
  return nullptr;
}

std::string_view expected_transport(int ranks) {
  return gpu_count() >= ranks ? "nccl" : "one_gpu";
}

std::vector<std::byte> bytes_of(const SymmetricBuffer& buffer, size_t first, size_t count) {
  std::vector<std::byte> bytes(count);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(bytes.data(), buffer.local() + first, count, cudaMemcpyDefault));
  return bytes;
}

void clear(const SymmetricBuffer& buffer) {
  check(cudaMemset(buffer.local(), 0, buffer.bytes()));
  check(cudaDeviceSynchronize());
}

void with_ranks(const Setup& setup, const std::function<void(Communicator&)>& body) {
  WorldOptions options;
  options.ranks = setup.ranks;
  options.deadline_s = 30;
  options.ranks_per_gpu = gpu_count() >= setup.ranks ? 1 : setup.ranks;
  run_gpus(options, body);
}

int run_all_tests(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!has_gpu("gpu_comm_test")) return kNothingTested;
  return unless_all_skipped("gpu_comm_test", RUN_ALL_TESTS());
}

}  // namespace tandem::test
