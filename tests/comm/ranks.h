// One suite, every transport. Without a launcher, a test executable runs each case on 1 to 4
// thread-ranks, without a link and over a fast emulated one. Under mpirun or with torchrun's
// variables, the world is entered once for all tests, and each case runs on the world's first
// ranks. Executables linked with tests/gpu/ranks.cc in place of ranks.cc run each case on up to 8
// GPUs, or up to 16 ranks that share one.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"

namespace tandem::test {

struct Setup {
  int ranks;
  bool link;
};
std::string name_of(const testing::TestParamInfo<Setup>& info);
std::vector<Setup> setups();

/// World of processes, with or without MPI, under a launcher; else nullptr.
Communicator* mpi_world();

/// Name that the transport reports.
std::string_view expected_transport(int ranks);

/// Bytes [first, first + count) of this rank's `buffer`, in host or device memory.
std::vector<std::byte> bytes_of(const SymmetricBuffer& buffer, size_t first, size_t count);
/// Words [first, first + count), likewise.
inline std::vector<uint64_t> words_of(const SymmetricBuffer& buffer, size_t first, size_t count) {
  std::vector<uint64_t> words(count);
  std::memcpy(words.data(), bytes_of(buffer, first * 8, count * 8).data(), count * 8);
  return words;
}
void clear(const SymmetricBuffer& buffer);

/// Runs `body` on `setup.ranks` ranks. Under a launcher the others wait.
void with_ranks(const Setup& setup, const std::function<void(Communicator&)>& body);

/// Base of the parameterised suites.
class OnRanks : public testing::TestWithParam<Setup> {
 protected:
  int ranks() const { return GetParam().ranks; }
  void run(const std::function<void(Communicator&)>& body) { with_ranks(GetParam(), body); }
};

int run_all_tests(int argc, char** argv);

}  // namespace tandem::test

/// Skips cases that end a world: aborts and ranks that never arrive.
#define TANDEM_SKIP_UNDER_MPI(reason) \
  if (tandem::test::mpi_world()) GTEST_SKIP() << "threads only: " << reason

/// Instantiates an OnRanks suite over the transport of this process.
#define TANDEM_INSTANTIATE(suite)                                                   \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite);                             \
  INSTANTIATE_TEST_SUITE_P(Ranks, suite, testing::ValuesIn(tandem::test::setups()), \
                           tandem::test::name_of)
