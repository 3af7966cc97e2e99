#include "tests/comm/ranks.h"

#include <cstdlib>
#include <cstring>
#include <memory>

namespace tandem::test {
namespace {

Communicator* world = nullptr;

// Setups are created before the world is entered; under a launcher the rank count is read from its
// environment.
int launched_ranks() {
  const char* size = std::getenv(launched_by_mpi() ? "OMPI_COMM_WORLD_SIZE" : "WORLD_SIZE");
  return size ? std::atoi(size) : 1;
}

}  // namespace

std::string name_of(const testing::TestParamInfo<Setup>& info) {
  return std::to_string(info.param.ranks) + (info.param.link ? "_link" : "");
}

std::vector<Setup> setups() {
  if (launched()) return {{launched_ranks(), false}};
  std::vector<Setup> all;
  for (const bool link : {false, true}) {
    for (const int ranks : {1, 2, 3, 4}) all.push_back({ranks, link});
  }
  return all;
}

Communicator* mpi_world() {
  return world;
}

std::string_view expected_transport(int) {
  if (!world) return "threads";
  return launched_by_mpi() ? "mpi" : "processes";
}

std::vector<std::byte> bytes_of(const SymmetricBuffer& buffer, size_t first, size_t count) {
  return {buffer.local() + first, buffer.local() + first + count};
}

void clear(const SymmetricBuffer& buffer) {
  std::memset(buffer.local(), 0, buffer.bytes());
}

void with_ranks(const Setup& setup, const std::function<void(Communicator&)>& body) {
  if (world) {
    const double deadline = world->deadline();
    body(*world);
    world->set_deadline(deadline);
    return;
  }
  WorldOptions options;
  options.ranks = setup.ranks;
  options.deadline_s = 30;
  if (setup.link) options.link = EmulatedLink::parse("8GB/s,5us");
  run_threads(options, body);
}

int run_all_tests(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (!launched()) return RUN_ALL_TESTS();
  int failed = 1;
  run_world({}, [&](Communicator& comm) {
    world = &comm;
    failed = RUN_ALL_TESTS();
    world = nullptr;
  });
  return failed;
}

}  // namespace tandem::test
