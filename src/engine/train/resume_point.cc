#include "engine/train/resume_point.h"

#include <fmt/format.h>

#include "core/system/files.h"
#include "engine/checkpoint/loading.h"
#include "engine/parallel/collective_check.h"

namespace tandem {

TrainState ResumePoint::state() const {
  return memory ? memory->state : read_train_state(checkpoint);
}

ResumePoint find_resume_point(Communicator& world, SnapshotMemory& memory, RunFiles* files,
                              int64_t parameters) {
  ResumePoint point{memory.find(world), ""};
  point.checkpoint = on_rank_zero(
      world, "the state to resume from",
      [&] {
        for (const std::string& text : memory.take_warnings()) files->warn(text);
        if (!point.memory) return files->find_checkpoint(-1);
        std::string newer = files->find_checkpoint(point.memory->state.step);
        if (newer.empty()) {
          files->accept_memory(point.memory->state, describe(point.memory->position));
        }
        return newer;
      },
      uint64_t(12 * parameters));
  if (!point.checkpoint.empty()) point.memory.reset();
  return point;
}

std::optional<TrainState> restore(const TrainedRanks& ranks, SnapshotMemory& memory,
                                  ResumePoint from, RunFiles* files, int64_t parameters) {
  while (from.memory) {
    const std::string reason = memory.restore(ranks, from.memory->position);
    if (reason.empty()) return from.memory->state;
    if (files) {
      files->warn(fmt::format("{} is not restored: {}", describe(from.memory->position), reason));
    }
    from = find_resume_point(ranks.world, memory, files, parameters);
  }
  if (from.is_start()) return {};
  ranks.world.require_same("the checkpoint to resume from",
                           content_hash(read_file(from.checkpoint + "/state.json")));
  const std::string change = load_checkpoint(ranks, from.checkpoint);
  if (!change.empty() && files) files->note(change);
  return from.state();
}

}  // namespace tandem
