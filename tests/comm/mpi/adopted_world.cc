// A caller that uses MPI itself: halves of its communicator become separate worlds. Prints "ok".
#include <fmt/format.h>
#include <mpi.h>

#include <chrono>
#include <string>
#include <thread>

#include "tandem/collectives.h"
#include "tandem/world.h"

namespace {

using namespace tandem;

void expect(bool holds, const char* what) {
  if (!holds) throw Error(fmt::format("expected {}", what));
}

std::string refusal(int handle) {
  try {
    World::adopt_mpi(handle);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing";
}

void sum_up(Communicator& comm) {
  float value = float(comm.rank() + 1);
  all_reduce(comm, Tensor::of(&value, {1}));
  expect(value == float(comm.size() * (comm.size() + 1) / 2), "the sum of all ranks");
}

/// Runs a world whose rank 0 aborts if `failing`, and leaves before the others enter: an abort of
/// one half does not reach the other.
bool is_aborted(int handle, bool failing) {
  int rank = 0;
  MPI_Comm_rank(MPI_Comm_f2c(handle), &rank);
  if (failing && rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  try {
    const World world = World::adopt_mpi(handle, {.deadline_s = 30});
    const auto comm = world.communicator();
    if (failing && comm->rank() == 0) comm->abort("enough");
    for (int i = 0; i < 3; ++i) comm->barrier();
  } catch (const Aborted&) {
    return true;  // its other ranks may not have entered yet
  }
  return false;
}

void check() {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  const int handle = MPI_Comm_c2f(half);
  {
    const World world = World::adopt_mpi(handle, {.deadline_s = 30});
    const auto comm = world.communicator();
    int in_half = 0;
    MPI_Comm_rank(half, &in_half);
    expect(comm->rank() == in_half, "the caller's order");
    expect(refusal(handle).find("open in this process") != std::string::npos, "one at a time");
    sum_up(*comm);
  }
  expect(is_aborted(handle, rank % 2 == 0) == (rank % 2 == 0), "an abort in the first half alone");
  if (size > 1) {
    expect(refusal(MPI_Comm_c2f(MPI_COMM_WORLD)).find("another communicator") != std::string::npos,
           "no other ranks later");
  }
  expect(refusal(-7).find("handle -7") != std::string::npos, "a handle");
  MPI_Comm_free(&half);
}

}  // namespace

int main() {
  int level = 0, rank = 0, status = 0;
  expect(refusal(0).find("not initialised") != std::string::npos, "MPI to be initialised");
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  try {
    check();
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    status = 1;
  }
  int worst = 0;
  MPI_Reduce(&status, &worst, 1, MPI_INT, MPI_MAX, 0, MPI_COMM_WORLD);
  MPI_Finalize();
  if (rank == 0 && worst == 0) fmt::print("ok\n");
  return status;
}
