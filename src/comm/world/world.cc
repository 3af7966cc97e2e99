#include "tandem/world.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/world/new_worlds.h"

namespace tandem {
namespace {

Communicators launched_ranks(const WorldOptions& options) {
  if (launched_by_mpi()) return new_mpi_rank(options);
  require_mpi_under_mpirun();
  if (launched()) return new_process_rank(options);
  return new_thread_ranks(options);
}

}  // namespace

World::World(const WorldOptions& options)
    : World(launched_ranks(options), std::uncaught_exceptions()) {}

World World::of_threads(const WorldOptions& options) {
  return {new_thread_ranks(options), std::uncaught_exceptions()};
}

World World::adopt_mpi(int communicator, const WorldOptions& options) {
  return {adopt_mpi_rank(communicator, options), std::uncaught_exceptions()};
}

World World::of_gpus(const WorldOptions& options) {
  return {new_gpu_ranks(options), std::uncaught_exceptions()};
}

World World::adopt_nccl(ncclComm* communicator, CUstream_st* stream, const WorldOptions& options) {
  return {adopt_nccl_rank(communicator, stream, options), std::uncaught_exceptions()};
}

World World::connect(int rank, int size, const Gather& gather, const WorldOptions& options) {
  return {connect_process_rank(rank, size, gather, options), std::uncaught_exceptions()};
}

World World::connect_gpus(int rank, int size, const Gather& gather, CUstream_st* stream,
                          const WorldOptions& options) {
  return {connect_gpu_rank(rank, size, gather, stream, options), std::uncaught_exceptions()};
}

World::World(Communicators communicators, int errors)
    : size_(communicators.front()->size()),
      communicators_(std::move(communicators)),
      errors_(errors) {
  for (const auto& comm : communicators_) ranks_.push_back(comm->rank());
}

World::~World() {
  if (std::uncaught_exceptions() <= errors_) return;
  try {
    abort("an error ended its world");
  } catch (const std::exception&) {
    // Out of memory for the message: the other ranks' waits end by their deadline.
  }
}

std::shared_ptr<Communicator> World::communicator(int rank) const {
  const auto found = std::find(ranks_.begin(), ranks_.end(), rank);
  if (found == ranks_.end()) {
    throw InvalidArgument(
        fmt::format("world: rank {}: expected one that this process holds: {}", rank, ranks_));
  }
  return communicators_[size_t(found - ranks_.begin())];
}

std::shared_ptr<Communicator> World::communicator() const {
  if (ranks_.size() == 1) return communicators_.front();
  throw InvalidArgument(
      fmt::format("world: communicator() of {} ranks in one process: expected a rank", size_));
}

void World::abort(const std::string& reason) const {
  for (const auto& comm : communicators_)
    comm->abort(reason);  // only a GPU's own communicator ends its waits
}

}  // namespace tandem
