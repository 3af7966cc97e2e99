#include "engine/train/resume_point.h"

#include <fmt/format.h>

#include "engine/parallel/collective_check.h"

namespace tandem {

TrainState ResumePoint::state() const {
  return memory ? memory->state : read_train_state(checkpoint);
}

ResumePoint find_resume_point(Communicator& world, SnapshotMemory& memory, RunFiles* files,
                              const TrainConfig& config) {
  ResumePoint point{memory.find(world), ""};
  point.checkpoint = on_rank_zero(
      world, "the state to resume from",
      [&] {
        for (const std::string& text : memory.take_warnings()) files->warn(text);
        if (!point.memory) return files->find_checkpoint(config, -1);
        std::string newer = files->find_checkpoint(config, point.memory->state.step);
        if (newer.empty()) {
          files->accept_memory(point.memory->state, describe(point.memory->position), config);
        }
        return newer;
      },
      uint64_t(12 * config.model.parameters()));
  if (!point.checkpoint.empty()) point.memory.reset();
  return point;
}

}  // namespace tandem
