#include <fmt/format.h>

#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/threads/first_error.h"
#include "comm/threads/new_group.h"
#include "comm/threads/threads_communicator.h"
#include "core/env.h"
#include "observe/recorder.h"

namespace tandem {
namespace {

using namespace threads;

void run_rank(const std::shared_ptr<Group>& group, int rank, double deadline_s,
              const std::function<void(Communicator&)>& body, FirstError& first) {
  SharedWorld& world = *group->world;
  recorder().set_rank(rank);
  try {
    ThreadsCommunicator comm(group, rank, deadline_s);
    body(comm);
    comm.drain();
  } catch (const Aborted& error) {
    first.keep(std::current_exception(), false);
    world.abort(rank, error.what());
  } catch (const std::exception& error) {
    first.keep(std::current_exception(), true);
    world.abort(rank, error.what());
  } catch (...) {
    first.keep(std::current_exception(), true);
    world.abort(rank, "unknown exception");
  }
}

}  // namespace

void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const double deadline_s = world_deadline(options.deadline_s);
  const auto group = new_group(options);
  const auto& world = group->world;
  FirstError first;
  {
    std::vector<std::jthread> rank_threads;
    try {
      for (int rank = 0; rank < options.ranks; ++rank) {
        rank_threads.emplace_back([&, rank] { run_rank(group, rank, deadline_s, body, first); });
      }
    } catch (const std::system_error& error) {
      const std::string reason = fmt::format("ranks {}: could start only {} threads: {}",
                                             options.ranks, rank_threads.size(), error.what());
      first.keep(std::make_exception_ptr(Unsupported(reason)), true);
      world->abort(-1, reason);
    }
  }
  world->close();
  first.rethrow();
}

}  // namespace tandem
