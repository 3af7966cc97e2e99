#include "bench/record_call.h"

#include "comm/rank_clocks.h"
#include "observe/clock_offset.h"

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
  const auto first = rank_clocks(comm);
  {
    const Tracing tracing;
    call();
  }
  const auto last = rank_clocks(comm);
  RankEvents local{comm.rank(), recorder().take_events(), {}};
  const auto rank = size_t(comm.rank());
  align_events(local.events, first[rank], last[rank]);
  std::vector<RankEvents> ranks = gather_events(comm, local);
  for (size_t i = 0; i < ranks.size(); ++i) {
    ranks[i].clock_bound_ns = bound_between(first[i], last[i]);
  }
  return ranks;
}

}  // namespace tandem
