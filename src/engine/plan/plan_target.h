// Job that a plan is for: a job file, a published model, or the folder of a model.
#pragma once

#include <cstdint>
#include <string>

#include "engine/config/config.h"

namespace tandem::plan {

struct TargetRequest {
  std::string subject;  ///< job file, name of a published model, or folder with a config.json
  std::string init;     ///< of a job file: folder of the model to start from; empty: the job's
  double gpus = 1;
  int64_t seq = 0, batch = 0;  ///< of a model; 0: at most 4,096, and about 4 Mi tokens a step
  int64_t tokens = 0;          ///< length of the run; 0: the job's, in place of its train.seconds
};

struct PlanTarget {
  std::string name;  ///< of the model or file
  TrainConfig config = {};
  TrainConfig base =
      {};  ///< what a job file without keys says: `config` is written as what differs
};

/// Throws InvalidArgument for a subject that is none of the three and for seq or batch with a job
/// file, IoError and ConfigError as load_run_config does.
PlanTarget read_target(const TargetRequest& request);

}  // namespace tandem::plan
