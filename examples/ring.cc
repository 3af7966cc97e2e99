// Put-with-signal: a token travels around a ring of ranks and every rank adds to it. There is no
// barrier: epochs only increase, so the same eight bytes and the same signal serve every lap.
//
//   build/bin/example_ring                  four ranks as threads
//   mpirun -n 3 build/bin/example_ring      three processes
#include <cstdio>
#include <cstring>

#include "tandem/tandem.h"

int main() {
  constexpr uint64_t kLaps = 1000;
  bool correct = true;
  tandem::WorldOptions options;
  if (!tandem::launched()) options.ranks = 4;

  tandem::run_world(options, [&](tandem::Communicator& comm) {
    const auto buffer = comm.allocate(sizeof(uint64_t), /*signals=*/1);
    const int next = (comm.rank() + 1) % comm.size();
    const int before = (comm.rank() + comm.size() - 1) % comm.size();
    uint64_t token = 0;
    for (uint64_t lap = 1; lap <= kLaps; ++lap) {
      // Rank 0 starts and ends each lap; the others forward the token when it arrives.
      if (comm.rank() != 0) {
        comm.wait(*buffer, 0, lap, {.op = "ring", .peer = before});
        std::memcpy(&token, buffer->local(), sizeof token);
      }
      token += uint64_t(comm.rank()) + 1;
      comm.put(next, *buffer, 0, &token, sizeof token, /*signal=*/0, /*epoch=*/lap);
      comm.flush();  // `token` may change again
      if (comm.rank() == 0) {
        comm.wait(*buffer, 0, lap, {.op = "ring", .peer = before});
        std::memcpy(&token, buffer->local(), sizeof token);
      }
    }
    if (comm.rank() == 0) {
      const uint64_t n = uint64_t(comm.size()), expected = kLaps * n * (n + 1) / 2;
      correct = token == expected;
      std::printf("%d ranks (%s), %llu laps: token %llu, expected %llu\n", comm.size(),
                  comm.link().c_str(), static_cast<unsigned long long>(kLaps),
                  static_cast<unsigned long long>(token),
                  static_cast<unsigned long long>(expected));
    }
  });
  return correct ? 0 : 1;
}
