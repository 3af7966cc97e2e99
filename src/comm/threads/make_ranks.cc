#include "comm/threads/make_ranks.h"

#include <algorithm>
#include <exception>

#include "comm/threads/each_rank.h"

namespace tandem::threads {

Communicators make_ranks(const Communicators& controls,
                         const std::function<std::shared_ptr<Communicator>(int rank)>& make) {
  Communicators made(controls.size());
  const auto error = run_each_rank(
      int(controls.size()), [&](int rank) { made[size_t(rank)] = make(rank); },
      [&](int rank, const std::string& reason) {
        controls[size_t(std::max(rank, 0))]->abort(reason);
      });
  if (error) std::rethrow_exception(error);
  return made;
}

}  // namespace tandem::threads
