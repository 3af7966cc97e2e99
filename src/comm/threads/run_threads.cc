#include <exception>

#include "comm/threads/each_rank.h"
#include "comm/threads/new_group.h"
#include "comm/threads/threads_communicator.h"
#include "core/system/env.h"
#include "observe/recorder.h"

namespace tandem {

using namespace threads;

void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body) {
  const double deadline_s = world_deadline(options.deadline_s);
  const auto group = new_group(options);
  const auto& world = group->world;
  const auto error = run_each_rank(
      options.ranks,
      [&](int rank) {
        recorder().set_rank(rank);
        ThreadsCommunicator comm(group, rank, deadline_s);
        body(comm);
        comm.drain();
      },
      [&](int rank, const std::string& reason) { world->abort(rank, reason); });
  world->close();
  if (error) std::rethrow_exception(error);
}

}  // namespace tandem
