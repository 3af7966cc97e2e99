#include "overlap/record_call.h"

namespace tandem {

std::vector<RankEvents> gather_events(Communicator& comm, const RankEvents& mine) {
  std::vector<RankEvents> ranks;
  for (const auto& blob : comm.exchange(pack(mine), "timeline")) ranks.push_back(unpack(blob));
  return ranks;
}

std::vector<RankEvents> record_call(Communicator& comm, const std::function<void()>& call) {
  comm.barrier("timeline");
  const TimePoint origin = std::chrono::steady_clock::now();
  recorder().set_tracing(true);
  call();
  recorder().set_tracing(false);
  return gather_events(comm, {comm.rank(), recorder().take_events(), origin});
}

}  // namespace tandem
