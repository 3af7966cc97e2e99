#include "comm/threads/make_ranks.h"

#include <fmt/format.h>

#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "comm/threads/first_error.h"

namespace tandem::threads {

Communicators make_ranks(const Communicators& controls,
                         const std::function<std::shared_ptr<Communicator>(int rank)>& make) {
  Communicators made(controls.size());
  FirstError first;
  const auto make_one = [&](size_t rank) {
    try {
      made[rank] = make(int(rank));
    } catch (const Aborted& error) {
      first.keep(std::current_exception(), false);
      controls[rank]->abort(error.what());
    } catch (const std::exception& error) {
      first.keep(std::current_exception(), true);
      controls[rank]->abort(error.what());
    }
  };
  {
    std::vector<std::jthread> of_ranks;
    try {
      for (size_t rank = 0; rank < controls.size(); ++rank) {
        of_ranks.emplace_back([&, rank] { make_one(rank); });
      }
    } catch (const std::system_error& error) {
      const std::string reason = fmt::format("ranks {}: could start only {} threads: {}",
                                             controls.size(), of_ranks.size(), error.what());
      first.keep(std::make_exception_ptr(Unsupported(reason)), true);
      controls.front()->abort(reason);
    }
  }
  first.rethrow();
  return made;
}

}  // namespace tandem::threads
