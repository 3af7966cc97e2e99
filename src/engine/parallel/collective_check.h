// Work on the files of a run, with an outcome that every rank shares.
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

/// While it lives, waits of `world` are as patient as files need.
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

/// `work` that reads or writes more has a thread of its own.
constexpr uint64_t kLongWorkBytes = uint64_t{1} << 30;

/// Collective: runs `work` on every rank at once and returns, on every rank, the texts of all by
/// rank. `work` makes no collective calls. It may take 600 s; where a rank reads or writes more
/// than kLongWorkBytes, as `bytes` says, the others wait for as long as it gets on, and 600 s more.
/// What `work` throws on a rank is thrown on all of them: an IoError or a ConfigError as itself, a
/// lack of memory as Unsupported, anything else as Error.
std::vector<std::string> on_every_rank(Communicator& world, std::string_view what, uint64_t bytes,
                                       const std::function<std::string()>& work);

/// The same for work that only rank 0 can do. Returns its text on every rank.
std::string on_rank_zero(Communicator& world, std::string_view what,
                         const std::function<std::string()>& work, uint64_t bytes = 0);

}  // namespace tandem
