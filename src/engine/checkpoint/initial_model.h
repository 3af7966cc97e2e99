// Settings of a run that starts from a model: where its job says nothing, the model's folder does.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/config/config.h"

namespace tandem {

/// Loads a job as load_config does, over what the model's folder `init` says (empty: the job's
/// train.init, or none): the keys of the model, data.tokenizer (the folder, if it has one), and
/// optimizer.lr 2e-5, min_lr 2e-6 and warmup of 5 % of train.steps, 1 to 100. `resumed`: the folder
/// of the run to resume instead, whose config.toml says these if it began so; empty, or without
/// one: a new run. Throws as load_config does; IoError for a folder that cannot be read;
/// ConfigError naming each key of the model that the job contradicts, with both values.
TrainConfig load_run_config(const std::string& file, std::span<const std::string> overrides,
                            std::string init, const std::string& resumed,
                            std::vector<std::string>* notes);
/// Loads a job without a file: what the model's folder `init` says, changed by `set_defaults`, and
/// `overrides` over both. Throws as load_run_config does.
TrainConfig load_initial_config(const std::string& init,
                                const std::function<void(TrainConfig&)>& set_defaults,
                                std::span<const std::string> overrides,
                                std::vector<std::string>* notes);

}  // namespace tandem
