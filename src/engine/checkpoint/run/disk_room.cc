#include "engine/checkpoint/run/disk_room.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "core/system/files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem {

std::string check_disk_room(const std::string& folder, uint64_t free, int64_t num_present,
                            const DiskNeeds& needs) {
  const int64_t more =
      needs.is_periodic ? std::max<int64_t>(1, needs.keep + 1 - num_present) : int64_t{1};
  const double needed = double(more) * needs.checkpoint_bytes + needs.final_bytes;
  if (double(free) >= needed) return "";
  const std::string text = fmt::format(
      "{}: {} free: expected {}, for {} more checkpoint{} of {}{} and {} of final/", folder,
      format_bytes(double(free)), format_bytes(needed), more, more == 1 ? "" : "s",
      format_bytes(needs.checkpoint_bytes),
      more == 1 ? ""
                : fmt::format(" (checkpoint.keep = {}, and one while it is written)", needs.keep),
      format_bytes(needs.final_bytes));
  if (needs.must_fit && double(free) < needs.checkpoint_bytes) {
    throw IoError(text + "; not even one can be saved");
  }
  return text;
}

std::string check_disk_room(const std::string& out, int64_t step, const DiskNeeds& needs) {
  const std::string folder = out + "/checkpoints";
  std::error_code code;
  const bool is_there =
      std::filesystem::symlink_status(folder, code).type() != std::filesystem::file_type::not_found;
  if (is_there && !path_exists(folder)) {
    throw IoError(folder + ": a link to nothing: expected a folder");
  }
  if (is_there) CheckpointWriter(out, step);  // OUT, where the folder is made, has been written
  const std::string written = is_there ? folder : out;
  const auto free = free_bytes(written);
  if (!free) return "";
  return check_disk_room(written, *free, int64_t(list_checkpoints(out).size()), needs);
}

}  // namespace tandem
