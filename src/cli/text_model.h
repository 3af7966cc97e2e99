// Options and checks that the commands which write text with a trained model share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "cli/devices.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/infer/sampling/logits_processors.h"
#include "engine/infer/sampling/sampling.h"
#include "engine/model/weight_writer.h"
#include "tandem/communicator.h"

namespace tandem::cli {

/// `dir`, what train left.
void add_model_option(CLI::App& command, std::string& directory);
/// --tp.
CLI::Option* add_tp_option(CLI::App& command, int& ranks);
/// --dtype, --weights, those of devices, and --codec.
void add_compute_options(CLI::App& command, std::string& dtype, std::string& weights,
                         DeviceOptions& devices, std::string& codec);
/// --weights: a name that parse_weight_format takes; "none" for weights of --dtype.
void add_weights_option(CLI::App& command, std::string& weights);
/// `dtype`, or the devices' if it is empty.
std::string text_dtype(const std::string& dtype, const DeviceOptions& devices);
/// --prompt-rows: rows of a step for chunks of prompts, 0 if not given.
CLI::Option* add_prompt_rows_option(CLI::App& command, int64_t& rows);
/// --batch-invariant.
CLI::Option* add_batch_invariant_flag(CLI::App& command, bool& flag);
/// `rows`, or the devices' default if it is 0.
int64_t prompt_rows(int64_t rows, const DeviceOptions& devices);

/// Options of a command that writes texts which its device depends on.
struct TextNeeds {
  std::string weights = "none";  ///< of --weights
  bool batch_invariant = false;
  int64_t texts = 1;    ///< written at once
  bool is_iso = false;  ///< --prefill iso
};

/// Opens the model of a folder, sets the devices and `dtype` where they were not given, and checks
/// that the model writes text on `world`'s ranks, threads unless a launcher has started this
/// process. Throws as open_model and set_devices do; ConfigError naming what is wrong with its
/// sizes; Unsupported for one that GPUs do not take, or that has no weights of the format.
StoredModel open_text_model(const std::string& directory, DeviceOptions& devices,
                            WorldOptions& world, std::string& dtype, const TextNeeds& needs);

/// Weights that all ranks have read from files, by the slowest rank's clock.
struct LoadedWeights {
  double bytes, seconds;
};
/// "Loaded 2.62 GB of weights in 0.91 s: 2.88 GB/s".
std::string describe(const LoadedWeights& loaded);
/// Sets the weights of an engine from the stored model's files.
/// Collective.
template <typename Model>
LoadedWeights load_weights(Communicator& tp, const StoredModel& stored, Model& model) {
  return load_weights(tp, stored, [&](const SetParameter& set) { model.set_weights(set); });
}
LoadedWeights load_weights(Communicator& tp, const StoredModel& stored,
                           const std::function<void(const SetParameter&)>& set_weights);

/// Throws ConfigError naming the folder's generation_config.json if one of its defaults is out of
/// range.
void check_defaults(const StoredModel& stored, const SamplingOptions& sampling,
                    const LogitsProcessors& rules);

}  // namespace tandem::cli
