// Long work that ranks do different parts of, in files above all: they meet about once a second, so
// a wait lasts no longer than a slice of the work, however long all of it takes. A rank that makes
// no progress is found by the deadline, as in any other wait.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "engine/report/progress.h"
#include "tandem/communicator.h"

namespace tandem {

class SharedWork {
 public:
  /// `world`: nullptr for a process that works alone. `what`, a literal, names the work; `bytes` of
  /// it are this rank's; 0: not known.
  SharedWork(Communicator* world, std::string_view what, int64_t bytes);
  /// After a unit of work, of `bytes`. Rank 0 shows how far all ranks are once it takes long.
  void advance(int64_t bytes);
  /// Collective: returns once all ranks are done. `error`: why this rank cannot do its part, or
  /// empty; throws IoError on every rank with that of the first rank that has one.
  void finish(const std::string& error);

 private:
  using Clock = std::chrono::steady_clock;
  bool meet(bool busy, const std::string& error);
  void show(int64_t done, int64_t all);

  Communicator* world_;
  std::string_view what_;
  int64_t bytes_, done_ = 0;
  double slice_s_;
  Clock::time_point start_, met_;
  std::optional<ProgressLine> line_;
  std::string error_;  ///< of the first rank that has met one
};

}  // namespace tandem
