// Long work divided among ranks, mainly on files: ranks exchange progress about once a second, so a
// wait lasts no longer than a slice of the work, regardless of its total time. A rank without
// progress is detected by the deadline, as in any other wait.
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
  /// `world`: nullptr for a single process. `what`, a literal, names the work; `bytes`: this rank's
  /// share of it, 0 if unknown.
  SharedWork(Communicator* world, std::string_view what, int64_t bytes);
  /// Reports a finished unit of `bytes`. Rank 0 shows the progress of all ranks if the work takes
  /// long.
  void advance(int64_t bytes);
  /// Returns once all ranks are done. `error`: this rank's failure, or empty; throws IoError on
  /// every rank with the first error in rank order. Collective.
  void finish(const std::string& error);

 private:
  using Clock = std::chrono::steady_clock;
  bool exchange_progress(bool busy, const std::string& error);
  void show(int64_t done, int64_t all);

  Communicator* world_;
  std::string_view what_;
  int64_t bytes_, done_ = 0;
  double slice_s_;
  Clock::time_point start_, last_exchange_;
  std::optional<ProgressLine> line_;
  std::string error_;  ///< first error in rank order
};

}  // namespace tandem
