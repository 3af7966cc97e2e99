// One suite, every transport. On its own, a test executable runs each case on thread-ranks: 1, 2, 3
// and 4 of them, without a link and over a fast emulated one. Under mpirun or torchrun's variables
// the world is entered once, for all tests, and each case runs on the world's first ranks. What is
// linked with tests/gpu/ranks.cc in place of ranks.cc runs each on up to 8 GPUs, or up to 16 ranks
// that share one.
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

/// The world of processes, MPI's or not, under a launcher; else nullptr.
Communicator* mpi_world();

/// What the transport calls itself.
std::string_view expected_transport(int ranks);

/// Bytes [first, first + count) of this rank's `buffer`, wherever its memory is.
std::vector<std::byte> bytes_of(const SymmetricBuffer& buffer, size_t first, size_t count);
/// Words likewise.
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

/// For cases that end a world: aborts and ranks that never arrive.
#define TANDEM_SKIP_UNDER_MPI(reason) \
  if (tandem::test::mpi_world()) GTEST_SKIP() << "threads only: " << reason

/// Instantiates an OnRanks suite over the transport this process runs on.
#define TANDEM_INSTANTIATE(suite)                                                   \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(suite);                             \
  INSTANTIATE_TEST_SUITE_P(Ranks, suite, testing::ValuesIn(tandem::test::setups()), \
                           tandem::test::name_of)
