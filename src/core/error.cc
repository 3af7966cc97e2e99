#include "tandem/error.h"

#include <fmt/format.h>

namespace tandem {
namespace {

std::string timeout_message(const WaitSite& site, int rank, uint64_t epoch, uint64_t seen,
                            double seconds) {
  std::string text = fmt::format("{}: rank {} waited {:.3g} s", site.op, rank, seconds);
  if (site.peer >= 0) text += fmt::format(" for rank {}", site.peer);
  if (site.tile >= 0) text += fmt::format(", tile {}", site.tile);
  if (epoch > 0) text += fmt::format(", epoch {} (signal at {})", epoch, seen);  // 0: no signal
  return text + ": it never arrived";
}

}  // namespace

Timeout::Timeout(const WaitSite& site, int rank_, uint64_t epoch_, uint64_t seen, double seconds)
    : Error(timeout_message(site, rank_, epoch_, seen, seconds)),
      op(site.op),
      rank(rank_),
      peer(site.peer),
      tile(site.tile),
      epoch(epoch_) {}

Timeout::Timeout(const Timeout& other, const std::string& note)
    : Error(other.what() + (note.empty() ? "" : ": " + note)),
      op(other.op),
      rank(other.rank),
      peer(other.peer),
      tile(other.tile),
      epoch(other.epoch) {}

Aborted::Aborted(int rank, const std::string& reason_)
    : Error(rank < 0 ? "aborted: " + reason_
                     : fmt::format("aborted by rank {}: {}", rank, reason_)),
      origin(rank),
      reason(reason_) {}

}  // namespace tandem
