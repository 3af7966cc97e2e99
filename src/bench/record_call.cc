#include "bench/record_call.h"

namespace tandem {
namespace {

/// Disables tracing even if the call throws.
struct Tracing {
  Tracing() { recorder().set_tracing(true); }
  ~Tracing() { recorder().set_tracing(false); }
};

}  // namespace

std::vector<RankEvents> gather_events(Communicator& comm, const RankEvents& local) {
  std::vector<RankEvents> ranks;
  for (const auto& blob : comm.exchange(pack(local), "timeline")) ranks.push_back(unpack(blob));
  return ranks;
}

std::vector<RankEvents> record_call(Communicator& comm, const std::function<void()>& call) {
  comm.barrier("timeline");
  const TimePoint origin = std::chrono::steady_clock::now();
  {
    const Tracing tracing;
    call();
  }
  return gather_events(comm, {comm.rank(), recorder().take_events(), origin});
}

}  // namespace tandem
