// One rank of a world that fails in the way named by the first argument. Run by endings.sh, under
// mpirun or as processes without it; the script checks each rank's output and the exit status.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/overlap.h"

namespace {

using namespace tandem;

// Simulates a host whose network fails during operator calls. The network belongs to this process's
// namespace (netns_run.sh).
void lose_the_link(Communicator& comm) {
  constexpr int kOperators = 8;
  const AgGemm::Shape shape{.m = 2048, .n = 16, .k = 256};
  std::vector<float> x(size_t(shape.m / comm.size() * shape.k)), w(size_t(shape.n * shape.k)),
      out(size_t(shape.m * shape.n));
  const Tensor rows(x.data(), DType::f32, {shape.m / comm.size(), shape.k});
  const Tensor weight(w.data(), DType::f32, {shape.n, shape.k});
  const Tensor product(out.data(), DType::f32, {shape.m, shape.n});
  std::vector<std::unique_ptr<AgGemm>> operators;
  for (int i = 0; i < kOperators; ++i) {
    operators.push_back(
        std::make_unique<AgGemm>(comm, shape, OverlapOptions{Strategy::overlapped, 2}));
    operators.back()->run(rows, weight, product);
  }
  comm.barrier("before");
  comm.set_deadline(3);
  comm.barrier(
      "cut");  // rank 0's signal may not have left when its link goes: then the other waits here
  if (comm.rank() == 0 && std::system("ip link set eth0 down") != 0) {
    throw Unsupported("eth0 cannot be taken down");
  }
  for (const auto& op : operators) op->run(rows, weight, product);
  comm.barrier("after");
}

void end_badly(Communicator& comm, std::string_view how) {
  const int last = comm.size() - 1;
  if (how == "missing") {
    comm.set_deadline(0.5);
    if (comm.rank() == last) std::this_thread::sleep_for(std::chrono::seconds(2));
    comm.barrier("step 3");
  } else if (how == "missing-message") {
    const auto buffer = comm.allocate(8, 1);
    comm.set_deadline(0.5);
    if (comm.rank() == 0) comm.wait(*buffer, 0, 7, {"gather", last, 4});
    comm.set_deadline(30);
    comm.barrier("after");
  } else if (how == "throws") {
    const auto pair = comm.split(comm.rank() % 2, 0);
    if (comm.rank() == last) throw IoError("no such file: wheel");
    comm.barrier("never");
  } else if (how == "exits") {
    if (comm.rank() == last) std::exit(9);
    comm.barrier("never");
  } else if (how == "killed") {
    if (comm.rank() == last) kill(getpid(), SIGKILL);
    comm.barrier("never");
  } else if (how == "leaves") {
    if (comm.rank() == last) return;
    comm.barrier("never");
  } else if (how == "stays") {
    if (comm.rank() != last) return;
    std::this_thread::sleep_for(std::chrono::seconds(2));
    throw IoError("the last one");
  } else if (how == "dead-link") {
    lose_the_link(comm);
  } else if (how == "once" || how == "twice") {
    comm.barrier("once");
  } else {
    throw InvalidArgument(fmt::format("{}: expected a way to end", how));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view how = argc > 1 ? argv[1] : "";
  WorldOptions options;
  if (how == "mismatch") options.ranks = 7;
  try {
    run_world(options, [&](Communicator& comm) { end_badly(comm, how); });
    if (how == "twice") run_world(options, [&](Communicator& comm) { end_badly(comm, how); });
    fmt::print("done\n");
    return 0;
  } catch (const Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return error.exit_code();
  }
}
