// Work on the files of a run, with an outcome shared by all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"

namespace tandem {

constexpr double kDiskDeadlineS = 600;  ///< a slow disk is not a lost rank

/// Scope in which `world` waits with the longer deadline of file I/O.
class DiskDeadline {
 public:
  explicit DiskDeadline(Communicator& world) : world_(world), usual_(world.deadline()) {
    world_.set_deadline(std::max(usual_, kDiskDeadlineS));
  }
  ~DiskDeadline() { world_.set_deadline(usual_); }
  DiskDeadline(const DiskDeadline&) = delete;
  DiskDeadline& operator=(const DiskDeadline&) = delete;

 private:
  Communicator& world_;
  const double usual_;
};

/// Min bytes above which `work` runs in a separate thread.
constexpr uint64_t kLongWorkBytes = uint64_t{1} << 30;

/// Runs `work` on every rank concurrently and returns, on every rank, the texts of all ranks, by
/// rank. `work` makes no collective calls. It may take 600 s; if a rank reads or writes more than
/// kLongWorkBytes, by `bytes`, the others wait as long as it makes progress, and 600 s more. An
/// exception of `work` is thrown on all ranks: IoError and ConfigError with their type, out of
/// memory as Unsupported, all others as Error. Collective.
std::vector<std::string> on_every_rank(Communicator& world, std::string_view what, uint64_t bytes,
                                       const std::function<std::string()>& work);

/// Runs work on rank 0 only. Returns its text, or throws its error, on every rank.
std::string on_rank_zero(Communicator& world, std::string_view what,
                         const std::function<std::string()>& work, uint64_t bytes = 0);

}  // namespace tandem
