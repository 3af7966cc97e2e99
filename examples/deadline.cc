// A rank that never sends does not hang the others: the wait ends at its deadline with an error
// that names the operation, the waiting rank and the peer, and all other ranks are notified.
#include <cstdio>

#include "tandem/tandem.h"

int main() {
  tandem::WorldOptions options;
  options.ranks = 3;
  options.deadline_s = 0.2;
  try {
    tandem::run_threads(options, [](tandem::Communicator& comm) {
      const auto buffer = comm.allocate(64, /*signals=*/1);
      if (comm.rank() == 2) return;  // forgets to send
      if (comm.rank() == 0) {
        comm.wait(*buffer, 0, /*epoch=*/1, {.op = "my_gather", .peer = 2, .tile = 7});
      } else {
        comm.set_deadline(30);
        comm.barrier("the end");  // ends with Aborted as soon as rank 0 times out
      }
    });
  } catch (const tandem::Timeout& error) {
    std::printf("%s\n", error.what());
    const bool named = error.op == "my_gather" && error.peer == 2 && error.tile == 7;
    return named && error.rank == 0 ? 0 : 1;
  } catch (const tandem::Error& error) {
    std::printf("expected a timeout, got: %s\n", error.what());
  }
  return 1;
}
