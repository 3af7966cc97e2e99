#include "engine/checkpoint/state_json.h"

#include <fmt/format.h>

#include "core/system/files.h"
#include "core/system/json.h"
#include "tandem/error.h"

namespace tandem {

namespace {

constexpr int kFormat = 1;

nlohmann::json to_json(const ControlState& state) {
  return {{"tokens", state.tokens},
          {"warmup_tokens", state.warmup_tokens},
          {"nonfinite_skips", state.nonfinite_skips},
          {"spike_skips", state.spike_skips},
          {"mean_steps", state.mean_steps},
          {"mean_loss", state.mean_loss},
          {"lowest_validation_loss", state.lowest_validation_loss},
          {"validations_since_lowest", state.validations_since_lowest}};
}

ControlState control_from_json(const nlohmann::json& root) {
  ControlState state;
  state.tokens = -1;
  if (!root.contains("control")) return state;  // an older checkpoint
  const nlohmann::json& control = root.at("control");
  control.at("tokens").get_to(state.tokens);
  control.at("warmup_tokens").get_to(state.warmup_tokens);
  control.at("nonfinite_skips").get_to(state.nonfinite_skips);
  control.at("spike_skips").get_to(state.spike_skips);
  control.at("mean_steps").get_to(state.mean_steps);
  control.at("mean_loss").get_to(state.mean_loss);
  control.at("lowest_validation_loss").get_to(state.lowest_validation_loss);
  control.at("validations_since_lowest").get_to(state.validations_since_lowest);
  return state;
}

}  // namespace

std::string seal(nlohmann::json root) {
  root.erase("hash");
  root["hash"] = content_hash(dump_json(root, 2));
  return dump_json(root, 2) + "\n";
}

nlohmann::json to_json(const TrainState& state) {
  return {{"format", kFormat},
          {"step", state.step},
          {"next_sample", state.next_sample},
          {"elapsed_s", state.elapsed_s},
          {"warmup_s", state.warmup_s},
          {"control", to_json(state.control)},
          {"seq", state.seq},
          {"seed", state.seed},
          {"data", state.data},
          {"config", state.config},
          {"made_by", state.made_by}};
}

nlohmann::json parse_state(const std::string& text, const std::string& file) {
  nlohmann::json root = parse_json(text);
  if (!root.is_object() || seal(root) != text) {
    throw IoError(file + ": does not match its own hash (damaged)");
  }
  if (root.value("format", nlohmann::json()) != kFormat) {
    throw IoError(fmt::format("{}: format {}: expected {}", file,
                              root.value("format", nlohmann::json()).dump(), kFormat));
  }
  return root;
}

TrainState state_from_json(const nlohmann::json& root, const std::string& file) {
  TrainState state;
  try {
    root.at("step").get_to(state.step);
    root.at("next_sample").get_to(state.next_sample);
    root.at("elapsed_s").get_to(state.elapsed_s);
    state.warmup_s = root.value("warmup_s", 0.0);  // absent in older checkpoints
    state.control = control_from_json(root);
    root.at("seq").get_to(state.seq);
    root.at("seed").get_to(state.seed);
    root.at("data").get_to(state.data);
    root.at("config").get_to(state.config);
    state.made_by = root.value("made_by", state.made_by);  // absent in older checkpoints
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format("{}: {}", file, error.what()));
  }
  return state;
}

}  // namespace tandem
