// Room on disk for the checkpoints of a run, compared before its first step.
#pragma once

#include <cstdint>
#include <string>

namespace tandem {

struct DiskNeeds {
  double checkpoint_bytes = 0;
  double final_bytes = 0;    ///< of the model that is written last
  int64_t keep = 1;          ///< checkpoints that stay
  bool is_periodic = false;  ///< else the run writes one checkpoint, at its end
  /// The run cannot do without: false for one that continues from memory, which has its state.
  bool must_fit = true;
};

/// Throws IoError if OUT/checkpoints cannot be written, or if `needs.must_fit` and its file system
/// has no room for one checkpoint more than there are. Returns a warning with the numbers if there
/// is no room for all that the run has at a time: `keep`, one while it is written, and the model.
std::string check_disk_room(const std::string& out, int64_t step, const DiskNeeds& needs);
/// Checks a file system with `free` bytes, where `num_present` checkpoints are.
std::string check_disk_room(const std::string& folder, uint64_t free, int64_t num_present,
                            const DiskNeeds& needs);

}  // namespace tandem
